"""How well a left-to-right model predicts a text: every token once, with as much before it as the model can see."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Logits = Callable[[Tensor], Tensor]  # tokens [b, s] -> [b, s, v]


@dataclass
class Score:
    """Sums over texts. nats: minus the logarithm of their probability."""

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
    """Tokens `start` to `end`, of which those from `first` on are targets."""

    start: int
    first: int
    end: int


def windows(length: int, longest: int, stride: int) -> Iterator[Window]:
    """Windows over `length` tokens, the first of which is never a target, each other once.

    longest: tokens that the model can see. stride: targets of each window after the first one; the smaller, the
    more every target has before it, and the slower.
    """
    if not 1 <= stride < longest:
        raise ValueError(f"the stride {stride} must be at least 1 and less than the {longest} tokens of a window")
    first = 1
    while first < length:
        end = min(first + stride if first > 1 else longest, length)
        yield Window(max(end - longest, 0), first, end)
        first = end


@torch.no_grad()
def nats_of(ids: Sequence[int], logits_of: Logits, longest: int, stride: int, device: torch.device) -> list[float]:
    """[len(ids) - 1] nats of every token but the first, given those before it."""
    tokens = torch.tensor([ids], dtype=torch.int64, device=device)
    found: list[float] = []
    for window in windows(len(ids), longest, stride):
        piece = tokens[:, window.start : window.end]
        scores = torch.log_softmax(logits_of(piece[:, :-1])[0].float(), dim=-1)
        taken = -scores.gather(1, piece[0, 1:, None])[:, 0]
        found += taken[window.first - window.start - 1 :].tolist()
    return found


def border(context: Sequence[int], whole: Sequence[int]) -> int:
    """The first of the ids of a text, `whole`, that is not the one in its place among those of the text's beginning.

    A token may reach over the end of the beginning: it belongs to what follows.
    """
    pairs = enumerate(zip(context, whole, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(context), len(whole)))


@torch.no_grad()
def completes(
    context: Sequence[int], target: Sequence[int], logits_of: Logits, longest: int, device: torch.device
) -> bool:
    """Whether the likeliest token is the right one at every place of `target` (cloze, last word)."""
    tokens = torch.tensor([[*context, *target][-longest:]], dtype=torch.int64, device=device)
    best = logits_of(tokens[:, :-1])[0].argmax(dim=-1)
    return best[-len(target) :].tolist() == list(target)
