"""Beam search for one prompt, on log-probabilities that a model has computed."""

import torch
from torch import Tensor

ScoredTokens = tuple[float, list[int]]  # score (log-probability / length), tokens
EndId = int | tuple[int, ...]  # token that ends a text, or several such tokens


def list_ends(end_id: EndId) -> tuple[int, ...]:
    """Return the tokens that end a text."""
    return (end_id,) if isinstance(end_id, int) else end_id


class Beam:
    """Beam search for one prompt. After a step beam i continues the old beam parents[i] by the token new_tokens[i]."""

    def __init__(self, num_beams: int, max_new_tokens: int, end_id: EndId) -> None:
        self.num_beams = num_beams
        self.max_new_tokens = max_new_tokens
        self.end_ids = list_ends(end_id)
        # All beams start with the same text. The first step extends only one of them, or all beams would stay equal.
        self.totals = torch.full((num_beams,), -torch.inf)
        self.totals[0] = 0.0
        self.sequences: list[list[int]] = [[] for _ in range(num_beams)]
        self.finished: list[ScoredTokens] = []
        self.unfinished: list[ScoredTokens] = []
        self.parents = torch.arange(num_beams)
        self.new_tokens = torch.zeros(num_beams, dtype=torch.int64)
        self.is_over = max_new_tokens < 1

    def step(self, scores: Tensor) -> None:
        """Extend the beams by one token. scores: log-probabilities of the next token, [beams, v]."""
        length = len(self.sequences[0]) + 1
        totals = self.totals.unsqueeze(1) + scores
        # Each beam ends in one candidate for each end token, so of this many candidates, enough do not end.
        num_candidates = min((1 + len(self.end_ids)) * self.num_beams, totals.numel())
        best_scores, flat_indices = totals.flatten().topk(num_candidates)
        kept_totals: list[float] = []
        kept_parents: list[int] = []
        kept_tokens: list[int] = []
        for rank, (score, flat_index) in enumerate(zip(best_scores.tolist(), flat_indices.tolist(), strict=True)):
            parent, token = divmod(flat_index, scores.shape[1])
            if token in self.end_ids:
                if rank < self.num_beams:
                    self.finished.append((score / length, [*self.sequences[parent], token]))
            elif len(kept_tokens) < self.num_beams:
                kept_totals.append(score)
                kept_parents.append(parent)
                kept_tokens.append(token)
        self.finished = sorted(self.finished, reverse=True)[: self.num_beams]
        self.totals = torch.tensor(kept_totals)
        self.parents = torch.tensor(kept_parents)
        self.new_tokens = torch.tensor(kept_tokens)
        sequences = []
        for parent, token in zip(kept_parents, kept_tokens, strict=True):
            sequences.append([*self.sequences[parent], token])
        self.sequences = sequences
        # Even the worst of enough finished texts scores at least as high as the best unfinished one at this length.
        cannot_improve = len(self.finished) == self.num_beams and self.finished[-1][0] >= kept_totals[0] / length
        if length == self.max_new_tokens or cannot_improve:
            self.is_over = True
            self.unfinished = []
            for score, sequence in zip(kept_totals, sequences, strict=True):
                self.unfinished.append((score / length, sequence))
            # While searches for other prompts continue, the model still computes this search's rows. They are ignored.
            self.parents = torch.arange(self.num_beams)
            self.new_tokens = torch.zeros_like(self.new_tokens)

    def best(self) -> list[ScoredTokens]:
        """Return the best continuations, best first."""
        return sorted([*self.finished, *self.unfinished], reverse=True)[: self.num_beams]
