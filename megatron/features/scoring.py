"""Log-likelihood of text under a left-to-right model, for evaluations while training and for tools/evaluate.py.

Each token is scored once. A text that is longer than the context window is scored in a sliding window.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..json_text import JsonBoundError, parse_json, read_lines
from ..tokenizer import Tokenizer

Logits = Callable[[Tensor], Tensor]  # tokens [b, s] -> logits [b, s, v]


class Request(NamedTuple):
    """Token ids of which the last `num_targets` are to be scored; there are more ids than targets."""

    ids: list[int]
    num_targets: int


class Scored(NamedTuple):
    """Log-probability of a request's targets in nats, and whether greedy decoding yields the targets."""

    log_probability: float
    greedy: bool


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


class Window(NamedTuple):
    """Window over tokens start to end - 1. Those from `first` on are targets to score, the others only context."""

    start: int
    first: int
    end: int


def windows(length: int, max_length: int, stride: int) -> Iterator[Window]:
    """Yield windows that cover `length` tokens so that each token except the first is a target exactly once.

    max_length: tokens in a window, 1 more than the context window, because the last token is a target but not an input.
    stride: targets in each window but the first. A smaller stride gives each target more context and takes longer.
    """
    if not 1 <= stride < max_length:
        raise ValueError(f"--stride {stride} must be from 1 to {max_length - 1}, the context window in tokens")
    # With length 7, max_length 4, stride 2: tokens 0-3 score 1-3, then tokens 2-5 score 4-5, then 3-6 score 6.
    first = 1
    end = min(max_length, length)
    while first < length:
        yield Window(max(end - max_length, 0), first, end)
        first = end
        end = min(first + stride, length)


@torch.no_grad()
def token_nats(
    ids: Sequence[int], logits_of: Logits, max_length: int, stride: int, device: torch.device
) -> list[float]:
    """Return the negative log-likelihood of each token after the first, in nats. max_length, stride: see `windows`."""
    tokens = torch.tensor([ids], dtype=torch.int64, device=device)
    nats = []
    for window in windows(len(ids), max_length, stride):
        piece = tokens[:, window.start : window.end]  # [1, s]
        logits = logits_of(piece[:, :-1])[0].float()  # [s - 1, v]
        scores = torch.log_softmax(logits, dim=-1)
        piece_nats = -scores.gather(1, piece[0, 1:, None])[:, 0]  # [s - 1], for each token of the piece after its first
        # If the window has tokens 2 to 5, and 4 and 5 are targets, the nats are those of 3, 4 and 5: skip one.
        first = window.first - window.start - 1
        nats += piece_nats[first:].tolist()
    return nats


def score_one(request: Request, logits_of: Logits, device: torch.device) -> Scored:
    """Score a request with a model that one process holds."""
    tokens = torch.tensor([request.ids], dtype=torch.int64, device=device)
    with torch.no_grad():
        logits = logits_of(tokens[:, :-1])[0, -request.num_targets :]
    # 16 bits would be too coarse for a sum over many targets; fp64 stays.
    dtype = torch.promote_types(logits.dtype, torch.float32)
    scores = torch.log_softmax(logits.to(dtype), dim=-1)
    targets = tokens[0, -request.num_targets :]
    log_probability = scores.gather(1, targets[:, None]).sum().item()
    greedy = scores.argmax(-1) == targets
    return Scored(log_probability, bool(greedy.all()))


def read_cloze(path: str, tokenizer: Tokenizer, max_length: int) -> list[Request]:
    """Return a request for each line {"context": "...", "target": "..."} of a file of cloze questions.

    max_length: context window in tokens. The start of a longer context is left out.
    Raises ValueError that names the file and the line, and OSError.
    """
    requests = []
    for number, line in enumerate(read_lines(path), start=1):
        if line.isspace():
            continue
        where = f"{path}, line {number}"
        try:
            record = parse_json(line, where, dict)
            context = record["context"]
            target = record["target"]
            # Encode context and target together, as in a corpus. A token with parts of both belongs to the target.
            context_ids = tokenizer.encode(context)
            all_ids = tokenizer.encode(context + target)
        except JsonBoundError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError):  # no JSON, no such key, or a value that is no text
            raise ValueError(f'{where}: the line must have the form {{"context": "...", "target": "..."}}') from None
        # A token that contains the end of the context and the start of the target counts as part of the target.
        common_ids = os.path.commonprefix([context_ids, all_ids])  # of two lists, the items at their begin
        num_targets = len(all_ids) - len(common_ids)
        if not num_targets:
            raise ValueError(f"{where}: the target has no token of its own; lengthen the target")
        ids = [*tokenizer.before, *all_ids]
        # A target must fit into the window, and follow at least one id, from which it is predicted.
        if num_targets > min(max_length, len(ids) - 1):
            raise ValueError(f"{where}: the target has {num_targets} tokens, but the context window has {max_length}")
        # One id more than the window, as the last target is no input.
        requests.append(Request(ids[-max_length - 1 :], num_targets))
    if not requests:
        raise ValueError(f"{path} contains no questions")
    return requests
