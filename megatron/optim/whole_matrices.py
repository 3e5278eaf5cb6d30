"""Functions of whole matrices whose shards lie on the tensor-parallel ranks.

Shapes: o output features, i input features, t tensor-parallel ranks. A shard is [o/t, i] or [o, i/t].
"""

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

from megatron.mpu import Axis, ParamSpec, exchange_rows

MatrixFunction = Callable[[Tensor], Tensor]  # a matrix [o, i] -> a matrix of the same shape


def matrix_work(spec: ParamSpec) -> int:
    """Return the relative work of orthogonalising a parameter: the multiply-adds of all its matrices' Gram matrices."""
    return sum(rows * columns * min(rows, columns) for rows, columns in spec.matrices)


def apply_per_matrix(function: MatrixFunction, whole: Tensor, spec: ParamSpec) -> Tensor:
    """Apply `function` to each matrix of a whole parameter [o, i]; return the results in the order of its rows."""
    if spec.fused is None:
        return function(whole)
    results = torch.empty_like(whole, memory_format=torch.contiguous_format)
    # `split` gives views [g, part, width, i], as the rows of the fused matrices alternate. `function` needs [o, i].
    matrices = spec.fused.split(whole.contiguous())
    for matrix, result in zip(matrices, spec.fused.split(results), strict=True):
        computed = function(matrix.reshape(-1, whole.shape[1]))
        result.copy_(computed.view_as(result))
    return results


def apply_to_whole_matrices(
    function: MatrixFunction, shards: Sequence[Tensor], specs: Sequence[ParamSpec], axis: Axis
) -> list[Tensor]:
    """Apply `function` to the whole matrices of parameters; return this rank's shards of the results.

    shards: this rank's shard of each parameter, [o/t, i] or [o, i/t], of one dtype. axis: the tensor-parallel
    ranks; all of them must call this together. Each sharded parameter is computed by one of these ranks, which
    receives its shards and sends back those of the result. The ranks get about equal work.
    """
    results = list(shards)
    split_params = []
    costs = []
    for i, spec in enumerate(specs):
        if spec.split:
            split_params.append(i)  # computed below, by one rank for all
            costs.append(matrix_work(spec))
        else:
            results[i] = apply_per_matrix(function, shards[i], spec)
    if not split_params:
        return results
    from tds.flat_matrices import balance  # imports DeepSpeed, which a single process does not need

    # For example, of 3 sharded parameters on 2 ranks, rank 0 computes parameter 2, and rank 1 the parameters 0 and 1.
    params_by_rank = []  # for each rank, the parameters that it computes
    outgoing = []  # for each rank, this rank's shards of these parameters
    for rank_items in balance(costs, axis.size):  # positions in `split_params` of the parameters of one rank
        rank_params = [split_params[position] for position in rank_items]
        params_by_rank.append(rank_params)
        outgoing.append([shards[i] for i in rank_params])
    # The shards of a parameter have the same shape on all ranks, so those that arrive are like the own ones.
    templates = [outgoing[axis.rank]] * axis.size
    received = _exchange(outgoing, templates, axis)
    # For each rank, its shards of the results of this rank.
    outgoing_results: list[list[Tensor]] = [[] for _ in range(axis.size)]
    # received[r] lists the shards from rank r, so `parts` are all ranks' shards of parameter i.
    for i, *parts in zip(params_by_rank[axis.rank], *received, strict=True):
        dim = specs[i].dim or 0  # `or 0` only tells the type checker that a split parameter has a dimension
        whole = apply_per_matrix(function, torch.cat(parts, dim), specs[i])
        for rank_results, shard in zip(outgoing_results, whole.chunk(axis.size, dim), strict=True):
            rank_results.append(shard)
    # The shards that come back have the shapes of those that this rank has sent.
    received_results = _exchange(outgoing_results, outgoing, axis)
    for rank_params, shards_back in zip(params_by_rank, received_results, strict=True):
        for i, shard in zip(rank_params, shards_back, strict=True):
            results[i] = shard
    return results


def _exchange(
    outgoing: Sequence[Sequence[Tensor]], templates: Sequence[Sequence[Tensor]], axis: Axis
) -> list[list[Tensor]]:
    """Send the tensors outgoing[r] [any shapes] to rank r; return the tensors from each rank.

    templates: for each rank, tensors with the shapes of those that it sends to this rank.
    """
    any_tensor = next(chain(*outgoing, *templates))  # for its dtype and device: this rank may send nothing
    flat_outgoing = [any_tensor.new_empty(0)]  # because `cat` refuses an empty list
    for tensor in chain(*outgoing):
        flat_outgoing.append(tensor.reshape(-1))
    send_buffer = torch.cat(flat_outgoing)
    send_sizes = [sum(map(Tensor.numel, tensors)) for tensors in outgoing]
    receive_sizes = [sum(map(Tensor.numel, rank_templates)) for rank_templates in templates]
    receive_buffer = exchange_rows(send_buffer, send_sizes, receive_sizes, axis)
    received = []
    # Cut the buffer into the chunk of each rank, and each chunk into the rank's tensors.
    for chunk, rank_templates in zip(torch.split(receive_buffer, receive_sizes), templates, strict=True):
        parts = torch.split(chunk, list(map(Tensor.numel, rank_templates)))
        received.append([part.view_as(template) for part, template in zip(parts, rank_templates, strict=True)])
    return received
