"""Results of `eval_batch` for DeepSpeed's arguments `reduce_output`, `bcast_loss` and `compute_loss`."""

from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from .nested import as_tuple, unwrap


def check_arguments(reduce_output: str | None, micros: int) -> None:
    """Raise ValueError for invalid arguments of `eval_batch`."""
    if micros < 1:
        raise ValueError(f"num_micro_batches {micros}: there is nothing to evaluate; give 1 or more")
    if reduce_output not in (None, "avg"):
        raise ValueError(
            f"reduce_output {reduce_output!r} is neither 'avg' (the mean) nor None (a list over micro-batches)"
        )


def eval_result(engine: Any, loss: Tensor | None, reduce_output: str | None, bcast_loss: bool) -> Any:
    """Return the result of `eval_batch` on this rank.

    loss: the loss over all micro-batches and replicas, a scalar; None if `eval_batch` returns outputs instead.
    """
    is_last = engine.is_last_stage()
    if loss is not None and reduce_output:
        return loss if bcast_loss or is_last else None
    if not is_last:
        return None
    # `fwd_outputs` has one item for each micro-batch: its loss, or its outputs if no loss is computed.
    return _mean_outputs(engine) if reduce_output else engine.fwd_outputs


def _mean_outputs(engine: Any) -> Any:
    """Return the mean of the outputs over micro-batches and replicas, in the shapes of one micro-batch's outputs."""
    outputs = [as_tuple(each) for each in engine.fwd_outputs]
    sums = []
    # outputs[micro] has the tensors of a micro-batch. If some have fewer than others, the second check raises.
    for tensors in zip(*outputs, strict=False):
        if any(t.shape != tensors[0].shape for t in tensors):
            _raise_different_shapes()
        wide = torch.promote_types(tensors[0].dtype, torch.float32)  # a sum in fp16 may overflow
        sums.append(torch.stack(tensors).sum(0, dtype=wide))
    if any(len(each) != len(sums) for each in outputs):
        _raise_different_shapes()
    count = torch.tensor(float(len(outputs)), dtype=torch.float64, device=engine.device)
    if engine.dp_world_size > 1:  # replicas may have different numbers of micro-batches
        for each in [*sums, count]:
            dist.all_reduce(each, group=engine.grid.get_data_parallel_group())
    means = []
    for total, output in zip(sums, outputs[0], strict=True):
        dtype = torch.result_type(output, 1.0)  # the mean of integers is fp32
        means.append((total / count).to(dtype))
    return unwrap(tuple(means))


def _raise_different_shapes() -> NoReturn:
    raise ValueError(
        "eval_batch(compute_loss=False) averages the outputs of micro-batches, but here their shapes differ: "
        "use reduce_output=None to get the list of outputs"
    )
