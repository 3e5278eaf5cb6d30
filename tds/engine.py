"""The pipeline engine: it interprets a schedule; every instruction is one short method.

Built on DeepSpeed's own engine, of which it keeps the optimizer wrappers, gradient reduction,
checkpoints and monitors, and replaces the step: what is loaded, computed, sent and averaged.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import schedule
from ._deepspeed import StockPipelineEngine, optimizer_kind, quietly
from .boundary import BoundaryError, boundaries_of, check
from .channel import Channel, Layout, Parcel, layout_of
from .diagnose import Watchdog
from .timetable import check as check_schedule


def _as_tuple(x: Any) -> tuple[Tensor, ...]:
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def _unwrap(x: tuple[Tensor, ...]) -> Any:
    """Layers get a tensor where the tuple has one, as in DeepSpeed."""
    return x[0] if len(x) == 1 else x


class PipelineEngine(StockPipelineEngine):  # type: ignore[misc]
    """Trains a `PipelineModule`; made by `tds.initialize`.

    The loss of a step is the mean over its micro-batches and replicas of what `loss_fn(outputs,
    labels)` returns. If `loss_fn` has a method `count_targets(labels)`, then it returns sums,
    and the loss is their total over the whole global batch divided by the total of the counts:
    the number is the same however the batch is cut into micro-batches and replicas.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.fp16_enabled() and not self.zero_optimization():
            raise ValueError(
                "fp16 under a pipeline needs ZeRO stage 1 (without it DeepSpeed takes a wrong gradient norm): "
                'set "zero_optimization": {"stage": 1}'
            )
        batch_fn = getattr(self.module, "_megatron_batch_fn", None)
        if batch_fn is not None:
            self.set_batch_fn(batch_fn)
        self.boundaries = boundaries_of(self.module)
        self.schedule = schedule.schedule_of(self._config.pipeline)
        plan = [list(self.schedule(stage, self.num_stages, self.micro_batches)) for stage in range(self.num_stages)]
        check_schedule(plan, self.micro_batches)
        self.num_targets = 0.0  # targets of the last batch, over the whole global batch
        self._open_channels()
        timeout = float(self._config.pipeline.get("timeout", 600.0))
        self.watchdog = Watchdog(timeout, self._describe) if dist.get_world_size() > 1 else None
        self._inputs: dict[int, tuple[Tensor, ...]] = {}
        self._outputs: dict[int, tuple[Tensor, ...]] = {}
        self._grads: dict[int, list[Tensor]] = {}
        self._received: dict[int, list[Parcel]] = {}
        self._batches: list[tuple[Any, Any]] = []
        self._micros, self._uniform = self.micro_batches, True  # of this step, and whether they have the same shapes
        self._sent_layout: Layout | None = None
        self._losses: list[Tensor] = []
        self._logits: list[Any] = []
        self._scale = torch.ones((), device=self.device)

    # ---------------------------------------------------------------- public

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One optimizer step over `gradient_accumulation_steps` micro-batches of `data_iter`.

        Returns the loss over the global batch, a scalar, the same on every rank.
        Raises RuntimeError if the iterator ends early.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch() needs gradients; use eval_batch() under no_grad()")
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.module.train()
        with self._watched():
            self._begin(self.micro_batches)
            self._run(self.schedule(self.stage_id, self.num_stages, self.micro_batches))
            self._at("reducing gradients over tied layers and replicas")
            self._exec_reduce_tied_grads()
            self._exec_reduce_grads()
            self._at("in the optimizer step")
            with quietly():
                self._exec_optimizer_step()
            self.agg_train_loss = self._mean_loss()
        self._report("train_loss", self.agg_train_loss)
        return self.agg_train_loss

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """The loss over `num_micro_batches` (default: as in training) without learning from them.

        return_logits: return `(loss, logits)`, where logits is the list of the last stage's
        outputs, one per micro-batch, and None on other stages. Shapes may differ from training.
        """
        del reduce_output, bcast_loss  # the loss is always the mean, and every rank gets it
        micros = num_micro_batches or self.micro_batches
        training_iterator = self.data_iterator
        self.set_dataiterator(data_iter)
        self.module.eval()
        with torch.no_grad(), self._watched():
            self._begin(micros, compute_loss, keep_logits=return_logits)
            self._run(schedule.forward_only(self.stage_id, self.num_stages, micros))
            loss = self._mean_loss() if compute_loss else None
        self.set_dataiterator(training_iterator)
        if loss is not None:
            self._report("eval_loss", loss)
        if not return_logits:
            return loss
        return loss, (self._logits if self.is_last_stage() else None)

    def clip_fp32_gradients(self) -> None:
        """Scale the gradients to the global norm; DeepSpeed's own counts the first stage alone."""
        params = [p for p in self.module.parameters() if p.grad is not None]
        copies_elsewhere = self.grid.get_slice_parallel_rank() > 0
        mine = [
            p.grad
            for p in params
            if not getattr(p, "ds_pipe_replicated", False)
            and (
                not copies_elsewhere
                or getattr(p, "tensor_model_parallel", False)
                or getattr(p, "model_parallel", False)
            )
        ]
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if mine:
            total += torch.stack([g.norm() for g in mine]).double().square().sum()
        dist.all_reduce(total, group=self.grid.get_model_parallel_group())
        norm = total.sqrt()
        self._global_grad_norm = norm.item()
        limit = self.gradient_clipping()
        if limit > 0 and params:
            factor = (limit / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_([p.grad for p in params], factor.to(params[0].grad.dtype))

    # ---------------------------------------------------------- instructions

    def _run(self, instructions: Iterator[schedule.Instruction]) -> None:
        for instruction in instructions:
            self._at(instruction)
            self._DO[type(instruction)](self, instruction.micro)
        self._at("waiting until its last messages have left")
        for channel in self._channels:
            channel.flush()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Around what other ranks depend on: a failure here ends all of them, with a report."""
        try:
            yield
        except BaseException as error:
            if self.watchdog:
                self.watchdog.fail(error)
            raise
        self._at(None)

    def _at(self, what: Any) -> None:
        if self.watchdog:
            self.watchdog.at(what)

    def _describe(self, what: Any) -> str:
        """What this rank is doing, in words."""
        where = f"stage {self.stage_id}"
        if not isinstance(what, schedule.Instruction):
            return f"{where}, {what}"
        peers = {
            schedule.RecvActivation: ("from", "_above"),
            schedule.SendActivation: ("to", "_down"),
            schedule.RecvGrad: ("from", "_below"),
            schedule.SendGrad: ("to", "_up"),
        }
        text = f"{where}, in {type(what).__name__} of micro-batch {what.micro}"
        if type(what) in peers:
            word, name = peers[type(what)]
            channel = getattr(self, name)
            text += f", {word} rank {channel.peer}{channel.waiting_for()}"
        return text

    def _forward(self, micro: int) -> None:
        inputs = self._inputs[micro]
        outputs = self.module(_unwrap(inputs))
        if not self.is_last_stage():
            self._outputs[micro] = _as_tuple(outputs)
            check(self._outputs[micro], self.boundaries, self.stage_id)
            due = [Parcel(p.tensor, split=p.split) for p in self._parcels(micro) if p.grad]
            if due:
                self._below.expect(layout_of(due))
            return
        if self._keep_logits:
            self._logits.append(outputs)
        if self._compute_loss:
            loss = outputs if self.module.loss_fn is None else self.module.loss_fn(outputs, self._batches[micro][1])
            self._losses.append(loss.detach())
            self._outputs[micro] = (loss * self._scale,)
        if not self.module.training:
            self._outputs.pop(micro, None)
            self._inputs.pop(micro, None)

    def _backward(self, micro: int) -> None:
        outputs = self._outputs.pop(micro)
        bf16 = optimizer_kind(self) == "bf16"
        if bf16:
            self.optimizer.clear_lp_grads()
        if self.is_last_stage():
            loss = outputs[0]
            scale = getattr(self.optimizer, "scale_if_loss", None)
            torch.autograd.backward([scale(loss) if scale else loss])
        else:
            wanted = [t for t in outputs if t.requires_grad]
            if wanted:
                torch.autograd.backward(wanted, self._grads.pop(micro))
        if bf16 and not self._config.bfloat16_config.immediate_grad_update:
            self.optimizer.update_hp_grads(clear_lp_grads=False)

    def _parcels(self, micro: int) -> list[Parcel]:
        """The outputs of a micro-batch, with what was declared of them."""
        outputs = self._outputs[micro]
        split = [each.split for each in self.boundaries] if self.boundaries else [False] * len(outputs)
        return [Parcel(t, t.requires_grad, s) for t, s in zip(outputs, split, strict=True)]

    def _send_activation(self, micro: int) -> None:
        parcels = self._parcels(micro)
        if not self.module.training:
            self._outputs.pop(micro)
        before, self._sent_layout = self._sent_layout, layout_of(parcels)
        first = before is None
        if self._uniform and not first and before != self._sent_layout:
            raise BoundaryError(
                f"stage {self.stage_id} puts out other shapes for micro-batch {micro} than for the one before, though the "
                f"inputs of the step have the same: what crosses a boundary may depend on their shapes alone"
            )
        self._down.send(parcels, f"stage {self.stage_id}", header=first or not self._uniform, uniform=self._uniform)

    def _recv_activation(self, micro: int) -> None:
        if micro == 0 or not self._uniform:
            layout, self._uniform = self._above.recv_header()
            for _ in range(self._micros if self._uniform else 1):
                self._above.expect(layout)
        parcels = self._above.take()
        for parcel in parcels:
            parcel.tensor.requires_grad_(parcel.grad and torch.is_grad_enabled())
        self._inputs[micro] = tuple(p.tensor for p in parcels)
        self._received[micro] = parcels

    def _send_grad(self, micro: int) -> None:
        self._inputs.pop(micro)
        due = [p for p in self._received.pop(micro) if p.grad]
        grads = [p.tensor.grad if p.tensor.grad is not None else torch.zeros_like(p.tensor) for p in due]
        if due:
            parcels = [Parcel(g, split=p.split) for g, p in zip(grads, due, strict=True)]
            self._up.send(parcels, f"stage {self.stage_id}", header=False)

    def _recv_grad(self, micro: int) -> None:
        if any(t.requires_grad for t in self._outputs[micro]):
            self._grads[micro] = [p.tensor for p in self._below.take()]

    _DO = {
        schedule.Forward: _forward,
        schedule.Backward: _backward,
        schedule.SendActivation: _send_activation,
        schedule.RecvActivation: _recv_activation,
        schedule.SendGrad: _send_grad,
        schedule.RecvGrad: _recv_grad,
    }

    # ------------------------------------------------------------- internals

    def _open_channels(self) -> None:
        """Groups for gradients beside the ones for activations, and the four directions of this rank."""
        up_group = None
        for ranks in self.grid._topo.get_axis_comm_lists("pipe") or [list(range(dist.get_world_size()))]:
            group = dist.new_group(ranks)
            if self.global_rank in ranks:
                up_group = group
        down_group = self.grid.get_pipe_parallel_group()
        place = (
            self.grid.get_slice_parallel_group(),
            self.grid.get_slice_parallel_rank(),
            self.grid.get_slice_parallel_world_size(),
        )

        def to(stage: int, group: Any) -> Channel:
            return Channel(self.grid.stage_to_global(stage_id=stage), group, self.device, *place)

        self._channels = []
        if not self.is_first_stage():
            self._above, self._up = to(self.prev_stage, down_group), to(self.prev_stage, up_group)
            self._channels += [self._above, self._up]
        if not self.is_last_stage():
            self._down, self._below = to(self.next_stage, down_group), to(self.next_stage, up_group)
            self._channels += [self._down, self._below]

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent over stage boundaries since it was made."""
        return sum(channel.bytes_sent for channel in self._channels)

    def _begin(self, micros: int, compute_loss: bool = True, keep_logits: bool = False) -> None:
        """Read the micro-batches of this step where they are needed, and find the scale of the loss."""
        self._compute_loss, self._keep_logits = compute_loss, keep_logits
        self._losses, self._logits = [], []
        self._micros, self._uniform, self._sent_layout = micros, True, None
        self._batches = []
        self._at("reading its micro-batches")
        if self.is_first_stage() or self.is_last_stage():
            for micro in range(micros):
                try:
                    inputs, labels = self._next_batch()
                except StopIteration:
                    raise RuntimeError(
                        f"the data iterator of stage {self.stage_id} ended after {micro} of {micros} micro-batches"
                    ) from None
                self._batches.append((self._to_device(inputs), self._to_device(labels)))
        if self.is_first_stage():
            self._inputs = {micro: _as_tuple(inputs) for micro, (inputs, _) in enumerate(self._batches)}
            self._uniform = len({layout_of([Parcel(t) for t in inputs]) for inputs in self._inputs.values()}) == 1
        count = getattr(self.module.loss_fn, "count_targets", None)
        self.num_targets = float(micros * self.dp_world_size)
        if self.is_last_stage():
            if count is not None:
                total = torch.zeros((), dtype=torch.float64, device=self.device)
                for _, labels in self._batches:
                    total += count(labels)
                dist.all_reduce(total, group=self.grid.get_data_parallel_group())
                self.num_targets = max(total.item(), 1.0)
            # Gradients are averaged over the replicas afterwards, hence the product with their number.
            self._scale = torch.tensor(self.dp_world_size / self.num_targets, dtype=torch.float64, device=self.device)

    def _to_device(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.detach().to(self.device, non_blocking=True)
        if isinstance(x, (tuple, list)):
            return tuple(self._to_device(each) for each in x)
        return x

    def _mean_loss(self) -> Tensor:
        """Sum of the losses over replicas / number of targets, told to all stages."""
        self._at("sharing the loss")
        numbers = torch.zeros(2, dtype=torch.float64, device=self.device)
        if self.is_last_stage():
            numbers[0] = torch.stack([loss.double() for loss in self._losses]).sum()
            dist.all_reduce(numbers, group=self.grid.get_data_parallel_group())
            numbers[1] = self.num_targets
        if self.num_stages > 1:
            source = self.grid.stage_to_global(stage_id=self.num_stages - 1)
            dist.broadcast(numbers, source, group=self.grid.get_pipe_parallel_group())
        self.num_targets = numbers[1].item()
        return numbers[0] / numbers[1]

    def _report(self, name: str, loss: Tensor) -> None:
        if self.global_rank == 0 and self.monitor.enabled:
            self.monitor.write_events([(f"Train/Samples/{name}", loss.item(), self.global_samples)])
