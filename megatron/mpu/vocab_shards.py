"""Collectives and checks of logits whose vocabulary is sharded over the model-parallel ranks.

Shapes: ... any leading dimensions (tokens), n tokens, v/t this rank's rows of the padded vocabulary.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import assert_later
from .mesh import Axis


def total(x: Tensor, axis: Axis, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """All-reduce x [...] in place over the ranks of `axis`."""
    if axis.size > 1:
        dist.all_reduce(x, op=op, group=axis.group)
    return x


SAMPLED = 32  # number of logits that ranks compare to recognise gathered logits


def _sample(logits: Tensor) -> Tensor:
    """Return SAMPLED logits at places spread over logits [n, v/t]."""
    at = [torch.linspace(0, length - 1, SAMPLED, device=logits.device).long() for length in logits.shape]
    return logits[at[0], at[1]]


def largest(own: Tensor, logits: Tensor, axis: Axis) -> Tensor:
    """Return each token's largest logit over all ranks, [...], from the largest `own` [...] of this rank's logits.

    logits: [n, v/t] of this rank, padding included. Raises ValueError if all ranks hold the same logits: each then
    holds the whole vocabulary. On an accelerator the check is asynchronous, and the device reports the error.
    """
    if axis.size == 1 or not logits.numel():
        return total(own.clone(), axis, dist.ReduceOp.MAX)
    sample = _sample(logits).to(own.dtype)
    # One all-reduce returns the maxima of the tokens, and the maximum and minimum of each sampled logit.
    parts = [own.numel(), SAMPLED, SAMPLED]
    maxima = total(torch.cat([own.flatten(), sample, -sample]), axis, dist.ReduceOp.MAX)
    of_tokens, high, low = torch.split(maxima, parts)
    gathered = (high == -low).all() & (high.amax() > high.amin())  # shards of zeros are equal, too
    _refuse_gathered(gathered, logits.shape[-1], axis)
    return of_tokens.view_as(own)


def _refuse_gathered(gathered: Tensor, width: int, axis: Axis) -> None:
    problem = (
        f"all {axis.size} model-parallel ranks have the same {width} logits for each token, but the loss needs each "
        "rank's shard of the vocabulary: do not gather the logits (parallel_output=True, gather_output=False)"
    )
    try:
        assert_later(~gathered, problem)
    except RuntimeError:
        if not gathered.is_cpu:
            raise
        raise ValueError(problem) from None


def refuse_other_tokens(logits: Tensor, target: Tensor) -> None:
    """Raise ValueError unless logits [..., v/t] and target [...] have the same tokens in the same order."""
    tokens = logits.shape[:-1]
    flattened = tokens.numel() == target.numel() and 1 in (len(tokens), target.dim())
    if tokens != target.shape and not flattened:
        raise ValueError(
            f"logits of shape {list(logits.shape)} do not match targets of shape {list(target.shape)}: give one target "
            "for each token, in the order of the logits; [s, b] targets are labels.t()"
        )


def padded_vocab_size(vocab_size: int, multiple: int, ranks: int) -> int:
    """Return the number of embedding rows: `vocab_size` rounded up to a multiple of `multiple * ranks`."""
    step = multiple * ranks
    return -(-vocab_size // step) * step


def refuse_strange_ids(ids: Tensor, vocab_size: int) -> None:
    """Raise IndexError for ids [...] outside the vocabulary, for which a sharded lookup would silently return zeros.

    On an accelerator the check is asynchronous, and the device reports the error.
    """
    if torch.compiler.is_compiling():
        return
    if type(ids) is not Tensor or ids.is_meta or not ids.numel():
        return
    words = f"is outside of the vocabulary of {vocab_size}"
    try:
        assert_later((ids >= 0) & (ids < vocab_size), f"a token id {words}")
    except RuntimeError:
        if ids.device.type != "cpu":
            raise
        strange = int(ids.min())
        if strange >= 0:
            strange = int(ids.max())
        raise IndexError(f"the token id {strange} {words}") from None
