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
        self.results: list[ScoredTokens] = []  # continuations that have ended; after the last step also the others
        self.parents = torch.arange(num_beams)
        self.new_tokens = torch.zeros(num_beams, dtype=torch.int64)
        self.is_over = max_new_tokens < 1

    def step(self, scores: Tensor) -> None:
        """Extend the beams by one token. scores: log-probabilities of the next token, [beams, v]."""
        length = len(self.sequences[0]) + 1
        totals = self.totals.unsqueeze(1) + scores
        # Each beam ends in one candidate for each end token, so of this many candidates, enough do not end.
        num_candidates = min((1 + len(self.end_ids)) * self.num_beams, totals.numel())
        best_totals, flat_indices = totals.flatten().topk(num_candidates)

        # The best candidates that do not end are the new beams. One that ends is finished if it is among the best
        # `num_beams` of all.
        new_totals: list[float] = []
        parents: list[int] = []
        sequences: list[list[int]] = []
        for place, (total, flat_index) in enumerate(zip(best_totals.tolist(), flat_indices.tolist(), strict=True)):
            # With v = 100, the flat index 205 is beam 2 followed by token 5.
            parent, token = divmod(flat_index, scores.shape[1])
            sequence = [*self.sequences[parent], token]
            if token in self.end_ids:
                if place < self.num_beams:
                    self.results.append((total / length, sequence))
            elif len(sequences) < self.num_beams:
                new_totals.append(total)
                parents.append(parent)
                sequences.append(sequence)
        self.results = self.best()
        self.totals = torch.tensor(new_totals)
        self.parents = torch.tensor(parents)
        self.new_tokens = torch.tensor(sequences)[:, -1]
        self.sequences = sequences

        # Results and new beams are sorted, best first. The search is over if even the worst result (index -1) scores at
        # least as high as the best unfinished text (index 0) at this length.
        cannot_improve = len(self.results) == self.num_beams and self.results[-1][0] >= new_totals[0] / length
        if length == self.max_new_tokens or cannot_improve:
            self.is_over = True
            for total, sequence in zip(new_totals, sequences, strict=True):
                self.results.append((total / length, sequence))
            # While searches for other prompts continue, the model still computes this search's rows. They are ignored.
            self.parents = torch.arange(self.num_beams)
            self.new_tokens = torch.zeros_like(self.new_tokens)

    def best(self) -> list[ScoredTokens]:
        """Return the best continuations, best first; fewer than `num_beams` if no more are possible."""
        possible = [result for result in self.results if result[0] > -torch.inf]
        return sorted(possible, reverse=True)[: self.num_beams]
