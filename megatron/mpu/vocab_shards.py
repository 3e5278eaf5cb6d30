"""Collectives and checks of logits whose vocabulary is sharded over the model-parallel ranks.

Shapes: ... any leading dimensions (tokens), n tokens, v/t this rank's rows of the padded vocabulary.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import assert_on_device
from .mesh import Axis


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of sums over x [...]: its own, but at least fp32."""
    return torch.promote_types(x.dtype, torch.float32)


def reduce_in_place(x: Tensor, axis: Axis, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """All-reduce x [...] in place over the ranks of `axis`."""
    if axis.size > 1:
        dist.all_reduce(x, op=op, group=axis.group)
    return x


NUM_SAMPLED = 32  # number of logits that ranks compare to recognise gathered logits


def max_over_ranks(own_max: Tensor, logits: Tensor, axis: Axis) -> Tensor:
    """Return each token's largest logit over all ranks, [...], from the largest `own_max` [...] of this rank's logits.

    logits: [n, v/t] of this rank, padding included. Raises ValueError if all ranks hold the same logits: each then
    holds the whole vocabulary. On an accelerator the check is asynchronous, and the device reports the error.
    """
    if axis.size == 1 or not logits.numel():  # no logits to compare
        return reduce_in_place(own_max.clone(), axis, dist.ReduceOp.MAX)
    # Sample logits at places spread over the matrix, from the first row and column to the last.
    rows, columns = [torch.linspace(0, length - 1, NUM_SAMPLED, device=logits.device).long() for length in logits.shape]
    sample = logits[rows, columns].to(own_max.dtype)
    # One all-reduce returns the maxima of the tokens, and the maximum and minimum of each sampled logit: min(x) is
    # -max(-x).
    sizes = [own_max.numel(), NUM_SAMPLED, NUM_SAMPLED]
    maxima = reduce_in_place(torch.cat([own_max.flatten(), sample, -sample]), axis, dist.ReduceOp.MAX)
    token_max, sample_max, minus_sample_min = torch.split(maxima, sizes)
    # Gathered logits are equal on all ranks: the maximum of each sample is its minimum. So are shards that hold only
    # zeros, but they were not gathered. Their samples do not differ from each other.
    is_gathered = (sample_max == -minus_sample_min).all() & (sample_max.amax() > sample_max.amin())
    _check_not_gathered(is_gathered, logits.shape[-1], axis)
    return token_max.view_as(own_max)


def _check_not_gathered(is_gathered: Tensor, width: int, axis: Axis) -> None:
    """Raise ValueError if `is_gathered`, a bool scalar, is true; an accelerator reports the error later."""
    problem = (
        f"all {axis.size} model-parallel ranks have the same {width} logits for each token, but the loss needs each "
        "rank's shard of the vocabulary: do not gather the logits (parallel_output=True, gather_output=False)"
    )
    try:
        assert_on_device(~is_gathered, problem)
    except RuntimeError:
        if not is_gathered.is_cpu:
            raise  # a device reports errors late, so this may be an error of earlier work
        raise ValueError(problem) from None


def check_same_tokens(logits: Tensor, target: Tensor) -> None:
    """Raise ValueError unless logits [..., v/t] and target [...] have the same tokens in the same order."""
    token_shape = logits.shape[:-1]
    # [s, b] targets match [s * b, v/t] logits, and [s * b] targets match [s, b, v/t] logits.
    one_is_flat = 1 in (len(token_shape), target.dim())
    matches = token_shape == target.shape or (one_is_flat and token_shape.numel() == target.numel())
    if not matches:
        raise ValueError(
            f"logits of shape {list(logits.shape)} do not match targets of shape {list(target.shape)}: give one target "
            "for each token, in the order of the logits; [s, b] targets are labels.t()"
        )


def padded_vocab_size(vocab_size: int, multiple: int, ranks: int) -> int:
    """Return the number of embedding rows: `vocab_size` rounded up to a multiple of `multiple * ranks`."""
    unit = multiple * ranks
    # -(-a // b) is a / b rounded up.
    return -(-vocab_size // unit) * unit


def check_token_ids(ids: Tensor, vocab_size: int) -> None:
    """Raise IndexError for ids [...] outside the vocabulary, for which a sharded lookup would silently return zeros.

    On an accelerator the check is asynchronous, and the device reports the error.
    """
    if torch.compiler.is_compiling():
        return
    # Fake tensors, which a compiler traces, and meta tensors have no values.
    if type(ids) is not Tensor or ids.is_meta or not ids.numel():
        return
    problem = f"is outside of the vocabulary of {vocab_size}"
    try:
        assert_on_device((ids >= 0) & (ids < vocab_size), f"a token id {problem}")
    except RuntimeError:
        if ids.device.type != "cpu":
            raise  # a device reports errors late, so this may be an error of earlier work
        # Name the smallest id if it is negative, else the largest, which is then too large.
        bad_id = int(ids.min())
        if bad_id >= 0:
            bad_id = int(ids.max())
        raise IndexError(f"the token id {bad_id} {problem}") from None
