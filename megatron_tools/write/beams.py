"""Beam search for one prompt, on log-probabilities that a model has computed."""

import torch
from torch import Tensor

Found = tuple[float, list[int]]  # score (log-probability / length ** length_penalty), tokens


class Beam:
    """Beam search for one prompt. After a step, beam i continues the previous beam order[i] with the token new[i]."""

    def __init__(self, beams: int, max_new_tokens: int, end: int, length_penalty: float) -> None:
        self.beams = beams
        self.longest = max_new_tokens
        self.end = end
        self.length_penalty = length_penalty
        # All beams start with the same text. The first step extends only one of them, or all beams would stay equal.
        self.total = torch.full((beams,), -torch.inf)
        self.total[0] = 0.0
        self.rows: list[list[int]] = [[] for _ in range(beams)]
        self.done: list[Found] = []
        self.unfinished: list[Found] = []
        self.order = torch.arange(beams)
        self.new = torch.zeros(beams, dtype=torch.int64)
        self.over = max_new_tokens < 1

    def step(self, scores: Tensor) -> None:
        """Extend the beams by one token. scores: log-probabilities of the next token, [beams, v]."""
        length = len(self.rows[0]) + 1
        share = length**self.length_penalty
        best, at = (self.total.unsqueeze(1) + scores).flatten().topk(2 * self.beams)
        totals: list[float] = []
        order: list[int] = []
        new: list[int] = []
        for rank, (score, flat) in enumerate(zip(best.tolist(), at.tolist(), strict=True)):
            row, token = divmod(flat, scores.shape[1])
            if token == self.end:
                if rank < self.beams:
                    self.done.append((score / share, [*self.rows[row], token]))
            elif len(new) < self.beams:
                totals.append(score)
                order.append(row)
                new.append(token)
        self.done = sorted(self.done, reverse=True)[: self.beams]
        self.total = torch.tensor(totals)
        self.order = torch.tensor(order)
        self.new = torch.tensor(new)
        self.rows = [[*self.rows[row], token] for row, token in zip(order, new, strict=True)]
        beaten = len(self.done) == self.beams and self.done[-1][0] >= totals[0] / share
        if length == self.longest or beaten:
            self.over = True
            self.unfinished = [(score / share, row) for score, row in zip(totals, self.rows, strict=True)]
            # While searches for other prompts continue, the model still computes this search's rows. They are ignored.
            self.order = torch.arange(self.beams)
            self.new = torch.zeros_like(self.new)

    def found(self) -> list[Found]:
        """Return the best continuations, best first."""
        return sorted([*self.done, *self.unfinished], reverse=True)[: self.beams]
