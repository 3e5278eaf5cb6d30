"""Log-likelihood of text under a left-to-right model. Each token is scored once, in a sliding window of context."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Logits = Callable[[Tensor], Tensor]  # tokens [b, s] -> logits [b, s, v]


@dataclass
class Score:
    """Sums over all scored texts: negative log-likelihood in nats, and numbers of tokens, characters and bytes."""

    nats: float = 0.0
    tokens: int = 0
    characters: int = 0
    bytes: int = 0

    def __iadd__(self, other: "Score") -> "Score":
        self.nats += other.nats
        self.tokens += other.tokens
        self.characters += other.characters
        self.bytes += other.bytes
        return self


@dataclass(frozen=True)
class Window:
    """Window over tokens start to end - 1. Those from `first` on are targets to score, the others only context."""

    start: int
    first: int
    end: int


def windows(length: int, longest: int, stride: int) -> Iterator[Window]:
    """Yield windows that cover `length` tokens so that each token except the first is a target exactly once.

    longest: tokens in a window, 1 more than the context window, because the last token is a target but not an input.
    stride: targets in each window but the first. A smaller stride gives each target more context and takes longer.
    """
    if not 1 <= stride < longest:
        raise ValueError(f"--stride {stride} must be from 1 to {longest - 1}, the context window in tokens")
    first = 1
    while first < length:
        end = min(first + stride if first > 1 else longest, length)
        yield Window(max(end - longest, 0), first, end)
        first = end


@torch.no_grad()
def nats_of(ids: Sequence[int], logits_of: Logits, longest: int, stride: int, device: torch.device) -> list[float]:
    """Return the negative log-likelihood of each token after the first, in nats. longest, stride: see `windows`."""
    tokens = torch.tensor([ids], dtype=torch.int64, device=device)
    found: list[float] = []
    for window in windows(len(ids), longest, stride):
        piece = tokens[:, window.start : window.end]
        scores = torch.log_softmax(logits_of(piece[:, :-1])[0].float(), dim=-1)
        taken = -scores.gather(1, piece[0, 1:, None])[:, 0]
        found += taken[window.first - window.start - 1 :].tolist()
    return found


def boundary(context: Sequence[int], whole: Sequence[int]) -> int:
    """Return how many leading ids `context` shares with `whole`, the ids of the context and its continuation.

    A token that contains the end of the context and the start of the continuation counts as part of the latter.
    """
    pairs = enumerate(zip(context, whole, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(context), len(whole)))


@torch.no_grad()
def completes(
    context: Sequence[int], target: Sequence[int], logits_of: Logits, longest: int, device: torch.device
) -> bool:
    """Return whether greedy decoding after `context` yields exactly `target`. longest: see `windows`."""
    tokens = torch.tensor([[*context, *target][-longest:]], dtype=torch.int64, device=device)
    best = logits_of(tokens[:, :-1])[0].argmax(dim=-1)
    return best[-len(target) :].tolist() == list(target)
