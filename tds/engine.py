"""The pipeline engine: it interprets a schedule; every instruction is one short method.

Built on DeepSpeed's own engine, of which it keeps the optimizer wrappers, gradient reduction,
checkpoints and monitors, and replaces the step: what is loaded, computed, sent and averaged.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import schedule
from ._deepspeed import StockPipelineEngine, default_to_non_reentrant, quietly
from .boundary import BoundaryError, agree, check, contract_of
from .channel import Channel, Layout, Parcel, layout_of, open_borders
from .clip import clip_grad_norm
from .diagnose import Watchdog
from .losses import Losses
from .nested import as_tuple, to_device, unwrap
from .progress import Progress
from .schedule import Instruction
from .split_backward import Rest, backward_input
from .timetable import check as check_schedule

At = tuple[int, int]  # micro-batch and chunk
PEERS = {
    schedule.RecvActivation: ("from", "above"),
    schedule.SendActivation: ("to", "down"),
    schedule.RecvGrad: ("from", "below"),
    schedule.SendGrad: ("to", "up"),
}


class PipelineEngine(StockPipelineEngine):  # type: ignore[misc]
    """Trains a `PipelineModule`; made by `tds.initialize`.

    The loss of a step is the mean over its micro-batches and replicas of what `loss_fn(outputs, labels)` returns:
    a tensor, or a dict of named ones, whose sum is learned from and which `named_losses` keeps apart. If `loss_fn` has
    a method `count_targets(labels)`, then it returns sums, and the loss is their total over the whole global batch
    divided by the total of the counts: the number is the same however the batch is cut into micro-batches and replicas.
    """

    data_iterator: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        default_to_non_reentrant(**kwargs)
        super().__init__(*args, **kwargs)
        batch_fn = getattr(self.module, "_megatron_batch_fn", None)
        if batch_fn is not None:
            self.set_batch_fn(batch_fn)
        self._chunks: int = getattr(self.module, "chunks", 1)
        settings = dict(self._config.pipeline)
        self._refuse_what_cannot_be(settings)
        self.schedule = schedule.schedule_of(settings, self._chunks)
        plan = [list(self.schedule(stage, self.num_stages, self.micro_batches)) for stage in range(self.num_stages)]
        check_schedule(plan, self.micro_batches)
        self._borders = open_borders(self.grid, self.device, self._chunks)
        self._channels = [channel for role in self._borders.values() for channel in role.values()]
        self._shake_hands(settings)
        timeout = float(settings.get("timeout", 600.0))
        self.watchdog = Watchdog(timeout, self._describe) if dist.get_world_size() > 1 else None
        self._inputs: dict[At, tuple[Tensor, ...]] = {}
        self._outputs: dict[At, tuple[Tensor, ...]] = {}
        self._grads: dict[At, list[Tensor]] = {}
        self._received: dict[At, list[Parcel]] = {}
        self._rests: dict[At, Rest] = {}
        self._batches: list[tuple[Any, Any]] = []
        self._losses = Losses(self.device)
        self._logits: list[Any] = []
        self._scale = torch.ones((), device=self.device)
        self._progress = Progress(self.device, self.steps_per_print(), self.wall_clock_breakdown())

    # ---------------------------------------------------------------- public

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One optimizer step over `gradient_accumulation_steps` micro-batches of `data_iter`.

        Without one, of the loader of `training_data` or `set_dataloader`. Returns the loss over
        the global batch, a scalar, the same on every rank. Raises RuntimeError if the data end early.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch() needs gradients; use eval_batch() under no_grad()")
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.module.train()
        with self._watched():
            self._begin(self.micro_batches)
            self._run(self.schedule(self.stage_id, self.num_stages, self.micro_batches))
            with self._progress.timed("Reduce"):
                self._at("reducing gradients over tied layers and replicas")
                self._exec_reduce_tied_grads()
                self._exec_reduce_grads()
            with self._progress.timed("Step"), quietly():
                self._at("in the optimizer step")
                self._exec_optimizer_step()
            self.agg_train_loss = self._share_losses()
        self._report("train_loss", self.agg_train_loss)
        line = self._progress.step(self.global_steps, self.train_batch_size(), self.named_losses)
        if line and self.global_rank == 0:
            print(line, flush=True)
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
        training, self.data_iterator = self.data_iterator, data_iter
        self.module.eval()
        try:
            with torch.no_grad(), self._watched():
                self._begin(micros, compute_loss, keep_logits=return_logits)
                self._run(schedule.forward_only(self.stage_id, self.num_stages, micros, self._chunks))
                loss = self._share_losses() if compute_loss else None
        finally:
            self.data_iterator = training
        if loss is not None:
            self._report("eval_loss", loss)
        if not return_logits:
            return loss
        return loss, (self._logits if self.is_last_stage() else None)

    @property
    def named_losses(self) -> dict[str, Tensor]:
        """The named losses of the last batch, over the global batch, the same on every rank."""
        return self._losses.means

    @property
    def num_targets(self) -> float:
        """Targets of the last batch, over the whole global batch; of micro-batches, if nothing counts targets."""
        return self._losses.targets

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent over stage boundaries since it was made."""
        return sum(channel.bytes_sent for channel in self._channels)

    def clip_fp32_gradients(self) -> None:
        """Scale the gradients to the global norm; DeepSpeed's own counts the first stage alone."""
        self._global_grad_norm = clip_grad_norm(self.module, self.grid, self.gradient_clipping(), self.device)

    # ---------------------------------------------------------- instructions

    def _run(self, instructions: Iterator[Instruction]) -> None:
        for instruction in instructions:
            self._at(instruction)
            with self._progress.timed(type(instruction).__name__):
                self._DO[type(instruction)](self, (instruction.micro, instruction.chunk))
        self._at("waiting until its last messages have left")
        for channel in self._channels:
            channel.flush()
        for channel in self._channels[:1]:
            channel.pool.trim()  # all of them share it

    def _forward(self, at: At) -> None:
        training, inputs = self.module.training, self._inputs[at]
        if not training:
            self._inputs.pop(at)
            self._received.pop(at, None)
        run = getattr(self.module, "forward_chunk", None)
        outputs = run(at[1], unwrap(inputs)) if run else self.module(unwrap(inputs))
        if at[1] in self._borders["down"]:
            self._outputs[at] = as_tuple(outputs)
            check(
                self._outputs[at], self._contract.puts_out[at[1]], f"stage {self.stage_id} puts out what it should not"
            )
            due = [Parcel(p.tensor, split=p.split) for p in self._parcels(at) if p.grad]
            if due:
                self._borders["below"][at[1]].expect(layout_of(due))
            return
        if self._keep_logits:
            self._logits.append(outputs)
        if self._compute_loss:
            loss = outputs if self.module.loss_fn is None else self.module.loss_fn(outputs, self._batches[at[0]][1])
            total = self._losses.add(loss)
            if training:
                self._outputs[at] = (total * self._scale,)

    def _roots(self, at: At) -> tuple[list[Tensor], list[Tensor | None]]:
        """What to differentiate, and the gradients that came for it."""
        self._inputs.pop(at)
        outputs = self._outputs.pop(at)
        if at[1] in self._borders["down"]:
            wanted = [t for t in outputs if t.requires_grad]
            return wanted, list(self._grads.pop(at)) if wanted else []
        scale = getattr(self.optimizer, "scale_if_loss", None)
        return [scale(outputs[0]) if scale else outputs[0]], [None]

    @contextmanager
    def _accumulating(self) -> Iterator[None]:
        """Around a backward pass: DeepSpeed's bf16 optimizer adds gradients up in fp32 itself."""
        if self.using_bf16_optimizer:
            self.optimizer.clear_lp_grads()
        yield
        if self.using_bf16_optimizer and not self.optimizer.immediate_grad_update:
            self.optimizer.update_hp_grads(clear_lp_grads=False)

    def _backward(self, at: At) -> None:
        outputs, grads = self._roots(at)
        if outputs:
            with self._accumulating():
                torch.autograd.backward(outputs, grads)

    def _backward_input(self, at: At) -> None:
        outputs, grads = self._roots(at)
        if outputs:
            due = [p.tensor for p in self._received.get(at, []) if p.grad]
            with self._accumulating():
                self._rests[at] = backward_input(outputs, grads, due)

    def _backward_weight(self, at: At) -> None:
        if at in self._rests:
            with self._accumulating():
                self._rests.pop(at).run()

    def _parcels(self, at: At) -> list[Parcel]:
        """The outputs of a micro-batch, with what was declared of them."""
        outputs, declared = self._outputs[at], self._contract.puts_out[at[1]]
        split = [each.split for each in declared] if declared else [False] * len(outputs)
        learns = torch.is_grad_enabled()  # a weight among the outputs says that it wants a gradient even in evaluation
        return [Parcel(t, t.requires_grad and learns, s) for t, s in zip(outputs, split, strict=True)]

    def _send_activation(self, at: At) -> None:
        micro, chunk = at
        parcels = self._parcels(at)
        if not self.module.training:
            self._outputs.pop(at)
        before, uniform, layout = self._sent.get(chunk), self._uniform[chunk], layout_of(parcels)
        self._sent[chunk] = layout
        if uniform and before is not None and before != layout:
            raise BoundaryError(
                f"stage {self.stage_id} puts out other shapes for micro-batch {micro} than for the one before, though the "
                f"inputs of the step have the same: what crosses a boundary may depend on their shapes alone"
            )
        header = before is None or not uniform
        self._borders["down"][chunk].send(parcels, f"stage {self.stage_id}", header=header, uniform=uniform)

    def _recv_activation(self, at: At) -> None:
        micro, chunk = at
        above = self._borders["above"][chunk]
        if micro == 0 or not self._uniform[chunk]:
            layout, self._uniform[chunk] = above.recv_header()
            for _ in range(self._micros if self._uniform[chunk] else 1):
                above.expect(layout)
        parcels = above.take()
        for parcel in parcels:
            parcel.tensor.requires_grad_(parcel.grad and torch.is_grad_enabled())
        self._inputs[at] = tuple(p.tensor for p in parcels)
        self._received[at] = parcels
        check(self._inputs[at], self._contract.takes_in[chunk], f"stage {self.stage_id} got of rank {above.peer}")

    def _send_grad(self, at: At) -> None:
        due = [p for p in self._received.pop(at) if p.grad]
        grads = [p.tensor.grad if p.tensor.grad is not None else torch.zeros_like(p.tensor) for p in due]
        if due:
            parcels = [Parcel(g, split=p.split) for g, p in zip(grads, due, strict=True)]
            self._borders["up"][at[1]].send(parcels, f"stage {self.stage_id}", header=False)

    def _recv_grad(self, at: At) -> None:
        if any(t.requires_grad for t in self._outputs[at]):
            self._grads[at] = [p.tensor for p in self._borders["below"][at[1]].take()]

    _DO = {
        schedule.Forward: _forward,
        schedule.Backward: _backward,
        schedule.BackwardInput: _backward_input,
        schedule.BackwardWeight: _backward_weight,
        schedule.SendActivation: _send_activation,
        schedule.RecvActivation: _recv_activation,
        schedule.SendGrad: _send_grad,
        schedule.RecvGrad: _recv_grad,
    }

    # ------------------------------------------------------------- internals

    def _refuse_what_cannot_be(self, settings: Mapping[str, Any]) -> None:
        name = settings.get("schedule", "1f1b")
        if self.fp16_enabled() and not self.zero_optimization():
            raise ValueError(
                "fp16 under a pipeline needs ZeRO stage 1 (without it DeepSpeed takes a wrong gradient norm): "
                'set "zero_optimization": {"stage": 1}'
            )
        if name == "interleaved" and self._chunks == 1 and self.num_stages > 1:
            raise ValueError("the schedule interleaved needs several chunks a stage: tds.PipelineModule(..., chunks=2)")
        if name == "zb-h1" and self.module.activation_checkpoint_interval > 0:
            raise ValueError(
                "the schedule zb-h1 would recompute activations twice, once for each half of the backward pass: "
                "use 1f1b with activation checkpointing, or zb-h1 without"
            )

    def _shake_hands(self, settings: Mapping[str, Any]) -> None:
        """Tell all stages of this pipeline what this one puts out and takes in; raises alike on all where it does not fit."""
        told = {key: settings.get(key) for key in ("schedule", "extra_warmup")}
        told |= {"gradient_accumulation_steps": self.micro_batches, "chunks": self._chunks}
        self._contract = contract_of(self.module, self._chunks, told)
        if self.num_stages > 1:
            everyone: list[Any] = [None] * self.num_stages
            dist.all_gather_object(everyone, self._contract, group=self.grid.get_pipe_parallel_group())
            agree(everyone)

    def _begin(self, micros: int, compute_loss: bool = True, keep_logits: bool = False) -> None:
        """Read the micro-batches of this step where they are needed, and find the scale of the loss."""
        self._compute_loss, self._keep_logits, self._logits = compute_loss, keep_logits, []
        self._micros, self._batches = micros, []
        self._sent: dict[int, Layout] = {}  # per chunk: the layout of the micro-batch before
        self._uniform = dict.fromkeys(range(self._chunks), True)  # and whether all of the step have the same
        self._at("reading its micro-batches")
        if self.is_first_stage() or self.is_last_stage():
            for micro in range(micros):
                try:
                    inputs, labels = self._next_batch()
                except StopIteration:
                    raise RuntimeError(
                        f"the data iterator of stage {self.stage_id} ended after {micro} of {micros} micro-batches"
                    ) from None
                self._batches.append((to_device(inputs, self.device), to_device(labels, self.device)))
        if self.is_first_stage():
            self._inputs = {(micro, 0): as_tuple(inputs) for micro, (inputs, _) in enumerate(self._batches)}
            self._uniform[0] = len({layout_of([Parcel(t) for t in inputs]) for inputs in self._inputs.values()}) == 1
            if self.module.activation_checkpoint_interval > 0 and self._config.pipeline.get("use_reentrant"):
                for t in (t for inputs in self._inputs.values() for t in inputs):
                    t.requires_grad_(t.is_floating_point())  # or the first checkpoint would not learn
        replicas = self.dp_world_size
        self._losses.begin(micros * replicas)
        if self.is_last_stage():
            count = getattr(self.module.loss_fn, "count_targets", None)
            self._losses.count(count, [labels for _, labels in self._batches], self.grid.get_data_parallel_group())
            # Gradients are averaged over the replicas afterwards, hence the product with their number.
            self._scale = torch.tensor(replicas / self.num_targets, dtype=torch.float64, device=self.device)

    def _share_losses(self) -> Tensor:
        """The loss over the global batch, told to all stages."""
        self._at("sharing the loss")
        if self.is_last_stage():
            self._losses.reduce(self.grid.get_data_parallel_group())
        if self.num_stages > 1:
            source = self.grid.stage_to_global(stage_id=self.num_stages - 1)
            self._losses.tell(source, self.grid.get_pipe_parallel_group())
        return self._losses.total

    def buffered_allreduce_fallback(self, *args: Any, **kwargs: Any) -> None:
        if self.dp_world_size > 1:  # DeepSpeed copies all gradients even where there is no replica to add
            super().buffered_allreduce_fallback(*args, **kwargs)

    def _exec_reduce_tied_grads(self) -> None:
        for weight, _ in self.module.get_tied_weights_and_groups():
            if weight.grad is None and not self.using_bf16_optimizer:
                weight.grad = torch.zeros_like(weight)  # another stage may have one, and waits for all
        super()._exec_reduce_tied_grads()

    # --------------------------------------------------- telling what goes on

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
        if not isinstance(what, Instruction):
            return f"{where}, {what}"
        text = f"{where}, in {type(what).__name__} of micro-batch {what.micro}"
        if self._chunks > 1:
            text += f", chunk {what.chunk}"
        if type(what) in PEERS:
            word, role = PEERS[type(what)]
            channel: Channel = self._borders[role][what.chunk]
            text += f", {word} rank {channel.peer}{channel.waiting_for()}"
        return text

    def _report(self, name: str, loss: Tensor) -> None:
        if self.global_rank == 0 and self.monitor.enabled:
            named = {} if len(self.named_losses) == 1 else self.named_losses
            events = [(f"Train/Samples/{each}", value.item(), self.global_samples) for each, value in named.items()]
            self.monitor.write_events([(f"Train/Samples/{name}", loss.item(), self.global_samples), *events])
