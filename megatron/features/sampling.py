"""Choice of the next token from logits, for samples while training and for tools/generate.py."""

from typing import NamedTuple

import torch
from torch import Tensor


class Sampling(NamedTuple):
    """Sampling parameters. temperature 0: greedy. top_k 0: all tokens. top_p: nucleus (Holtzman et al. 2020)."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


def sample_next_tokens(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Return next tokens [b], sampled from logits [b, v]."""
    temperature, top_k, top_p = sampling
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits / temperature
    if top_k:
        # The smallest of the k largest logits.
        threshold = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if top_p < 1:
        # With probabilities 0.5, 0.3 and 0.2, top_p 0.7 keeps two: the sums before them are 0, 0.5 and 0.8.
        sorted_logits, order = logits.sort(dim=-1, descending=True)
        probabilities = sorted_logits.softmax(dim=-1)
        mass_before = probabilities.cumsum(dim=-1) - probabilities
        kept = sorted_logits.masked_fill(mass_before >= top_p, -torch.inf)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, order, kept)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator).squeeze(-1)
