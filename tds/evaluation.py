"""Evaluation by a pipeline engine: forward passes only, and results for DeepSpeed's arguments of `eval_batch`."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .base_engine import PipelineHooks
from .nested import as_tuple, in_full
from .progress import report_losses


class PipelineEvaluation(PipelineHooks):
    """A pipeline engine's part that evaluates; PipelineEngine runs the instructions of `_eval_schedule`."""

    data_iterator: Any
    outputs: Any

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Return the loss over `num_micro_batches` (default: as in training), without training.

        Shapes may differ from those in training.
        return_logits: return `(result, outputs of the last micro-batch)`; the outputs are None except on the last
            stage.
        compute_loss: if False, return the outputs instead of the loss; other stages than the last get None.
        reduce_output: "avg" for the mean over micro-batches and replicas; None for the list over micro-batches, on
            the last stage only.
        bcast_loss: if False, only the last stage gets the loss.

        Raises ValueError for another `reduce_output`, and for fewer than one micro-batch.
        """
        micros = self.micro_batches if num_micro_batches is None else num_micro_batches
        if micros < 1:
            raise ValueError(f"num_micro_batches {micros}: there is nothing to evaluate; give 1 or more")
        if reduce_output not in (None, "avg"):
            raise ValueError(
                f"reduce_output {reduce_output!r} is neither 'avg' (the mean) nor None (a list over micro-batches)"
            )
        train_iterator = self.data_iterator
        self.data_iterator = data_iter
        self.module.eval()
        try:
            # Message buffers allocated in inference mode could not be reused for training.
            with torch.inference_mode(False), torch.no_grad(), self._watched(), self.observers.around("eval_batch"):
                self._begin(micros, compute_loss)
                self._run(self._cached_plan(self._eval_schedule, micros))
                loss = self._share_losses().read() if compute_loss else None
                result = eval_result(self, loss, reduce_output, bcast_loss)
                logits = in_full(self.outputs) if return_logits else None
        finally:
            self.data_iterator = train_iterator
            self.outputs = None
        if loss is not None:
            report_losses(self, "eval_loss", loss)
        return (result, logits) if return_logits else result


def eval_result(engine: Any, loss: Tensor | None, reduce_output: str | None, bcast_loss: bool) -> Any:
    """Return the result of `eval_batch` on this rank.

    loss: the loss over all micro-batches and replicas, a scalar; None if `eval_batch` returns outputs instead.
    """
    has_mean_loss = loss is not None and reduce_output
    is_last = engine.is_last_stage()
    if has_mean_loss and (is_last or bcast_loss):
        return loss
    if not is_last:
        return None
    # `fwd_outputs` has one item for each micro-batch: its loss, or its outputs if no loss is computed.
    return _mean_outputs(engine) if reduce_output else engine.fwd_outputs


def _mean_outputs(engine: Any) -> Any:
    """Return the mean of the outputs over micro-batches and replicas, in the shapes of one micro-batch's outputs."""
    outputs = list(map(as_tuple, engine.fwd_outputs))  # a tuple of tensors for each micro-batch
    if len(set(map(_shapes_of, outputs))) > 1:
        raise ValueError(
            "eval_batch(compute_loss=False) averages the outputs of micro-batches, but here their shapes differ: "
            "use reduce_output=None to get the list of outputs"
        )
    sums = []
    for tensors in zip(*outputs, strict=True):  # one output of all micro-batches
        wide = torch.promote_types(tensors[0].dtype, torch.float32)  # a sum in fp16 may overflow
        sums.append(torch.stack(tensors).sum(0, dtype=wide))
    count = torch.tensor(float(len(outputs)), dtype=torch.float64, device=engine.device)
    if engine.dp_world_size > 1:  # replicas may have different numbers of micro-batches
        for each in [*sums, count]:
            dist.all_reduce(each, group=engine.grid.get_data_parallel_group())
    means = []
    for total, output in zip(sums, outputs[0], strict=True):
        dtype = torch.result_type(output, 1.0)  # the mean of integers is fp32
        means.append((total / count).to(dtype))
    return means[0] if isinstance(engine.fwd_outputs[0], Tensor) else tuple(means)


def _shapes_of(outputs: Sequence[Tensor]) -> tuple[torch.Size, ...]:
    """Return the shapes of one micro-batch's outputs."""
    return tuple(output.shape for output in outputs)
