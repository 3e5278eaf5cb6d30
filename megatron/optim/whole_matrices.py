"""Functions of whole matrices whose shards lie on the tensor-parallel ranks.

Shapes: o output features, i input features, t tensor-parallel ranks. A shard is [o/t, i] or [o, i/t].
"""

from collections.abc import Callable, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.mpu import Axis, ParamSpec

Function = Callable[[Tensor], Tensor]  # a matrix [o, i] -> a matrix of the same shape


def work_of(spec: ParamSpec) -> int:
    """Return the relative work of orthogonalising a parameter: the multiply-adds of all its matrices' Gram matrices."""
    return sum(rows * columns * min(rows, columns) for rows, columns in spec.matrices)


def by_matrix(function: Function, whole: Tensor, spec: ParamSpec) -> Tensor:
    """Apply `function` to each matrix of a whole parameter [o, i]; return the results in the order of its rows."""
    if spec.fused is None:
        return function(whole)
    found = torch.empty_like(whole, memory_format=torch.contiguous_format)
    for matrix, result in zip(spec.fused.split(whole.contiguous()), spec.fused.split(found), strict=True):
        result.copy_(function(matrix.reshape(-1, whole.shape[1])).view(result.shape))
    return found


def by_whole_matrices(
    function: Function, shards: Sequence[Tensor], specs: Sequence[ParamSpec], axis: Axis
) -> list[Tensor]:
    """Apply `function` to the whole matrices of parameters; return this rank's shards of the results.

    shards: this rank's shard of each parameter, [o/t, i] or [o, i/t], of one dtype. axis: the tensor-parallel
    ranks; all of them must call this together. Each sharded parameter is computed by one of these ranks, which
    receives its shards and sends back those of the result. The ranks get about equal work.
    """
    found = list(shards)
    split = []
    for at, spec in enumerate(specs):
        if spec.split:
            split.append(at)
        else:
            found[at] = by_matrix(function, shards[at], spec)
    if not split:
        return found
    from tds.flat_matrices import balance  # imports DeepSpeed, which a single process does not need

    works = [work_of(specs[at]) for at in split]
    orders = []  # for each rank, the parameters that it computes
    outgoing = []
    for own in balance(works, axis.size):
        order = [split[index] for index in own]
        orders.append(order)
        outgoing.append([shards[at] for at in order])
    received = _exchange(outgoing, [outgoing[axis.rank]] * axis.size, axis)
    results: list[list[Tensor]] = [[] for _ in range(axis.size)]
    for at, *parts in zip(orders[axis.rank], *received, strict=True):
        dim = specs[at].dim or 0
        whole = by_matrix(function, torch.cat(parts, dim), specs[at])
        for to, shard in zip(results, whole.chunk(axis.size, dim), strict=True):
            to.append(shard)
    for order, back in zip(orders, _exchange(results, outgoing, axis), strict=True):
        for at, shard in zip(order, back, strict=True):
            found[at] = shard
    return found


def _exchange(
    outgoing: Sequence[Sequence[Tensor]], alike: Sequence[Sequence[Tensor]], axis: Axis
) -> list[tuple[Tensor, ...]]:
    """Send the tensors outgoing[r] [any shapes] to rank r; return the tensors from each rank.

    alike: for each rank, tensors with the shapes of those that it sends to this rank.
    """
    every = list(chain.from_iterable(outgoing))
    some = next(chain(every, *alike))
    sent = torch.cat([some.new_empty(0), *(tensor.reshape(-1) for tensor in every)])
    out = [sum(map(Tensor.numel, each)) for each in outgoing]
    into = [sum(map(Tensor.numel, each)) for each in alike]
    received = sent.new_empty(sum(into))
    dist.all_to_all_single(received, sent, into, out, group=axis.group)
    found = []
    for chunk, each in zip(torch.split(received, into), alike, strict=True):
        parts = torch.split(chunk, list(map(Tensor.numel, each)))
        found.append(tuple(part.view(like.shape) for part, like in zip(parts, each, strict=True)))
    return found
