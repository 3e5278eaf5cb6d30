"""The pipeline engine: an interpreter of schedules with one short method per instruction.

Optimizer wrappers, gradient reduction, checkpoints and monitors come from DeepSpeed's engine; this file replaces
`train_batch`. evaluation.py has `eval_batch`, and split_backward.py the handlers of a backward pass in two halves.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from . import schedule
from ._deepspeed import TRAIN_BATCH_TIMER, autocast, checkpointing, disable_timer_sync, patch_deepspeed
from .base_engine import PipelineHooks
from .batches import Batches, DataEnded
from .boundary import check_tensors
from .channel import BoundaryTensor, layout_of
from .diagnose import Watchdog, describe_activity
from .engine_classes import DeepSpeedMethods
from .evaluation import PipelineEvaluation
from .groups import host_group
from .losses import Losses
from .measure import check_factor
from .memory import non_leaf_view, pop_grad
from .messages import say
from .mistakes import require_gradient, require_iterator, require_scalar_loss
from .neighbours import connect_neighbours
from .nested import as_tuple, in_full
from .observers import Observers
from .optimizer_state import wait_for_weights
from .patches import instruction_handler, is_reduction_replaced, refuse_patches
from .posting import PASS_COST, SENDS, StagePlan, plan_of_stage
from .progress import MAX_TIMED_STEPS, Progress, report_losses
from .queues import has_message_queues
from .recompute import choose_checkpoint_function, views_requiring_grad
from .reducer import OverlappedReduction, choose_reduction
from .saving import PipelineState
from .schedule import Instruction
from .split_backward import SplitBackward
from .start import checked_schedule, exchange_declarations, refuse_idle_stages
from .step import Step
from .ties import tie_all_weights


class PipelineEngine(DeepSpeedMethods, PipelineEvaluation, SplitBackward):
    """Engine that trains a `PipelineModule`; made by `tds.initialize`.

    The loss of a step is the mean over its micro-batches and replicas of what `loss_fn(outputs, labels)` returns:
    a tensor, or a dict of named tensors. For a dict, training minimises the sum of the tensors, and `named_losses`
    returns each mean. If `loss_fn` has a method `count_targets(labels)`, `loss_fn` must return sums over targets.
    The loss of a step is then the total of these sums divided by the number of targets in the global batch, whatever
    the micro-batches and replicas. If `loss_fn` also has an attribute `mean_targets`, each step sets it to the mean
    number of targets of its micro-batches, or the vector of means if `count_targets` returns a vector of counts.
    """

    # DeepSpeedMethods is the first base only for clients that call `super(PipelineEngine, self)`. These methods are
    # those of DeepSpeed's pipeline engine, of which the first three raise an error.
    forward = PipelineHooks.forward
    backward = PipelineHooks.backward
    step = PipelineHooks.step
    module_state_dict = PipelineHooks.module_state_dict

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        patch_deepspeed()
        if type(self).train_batch is PipelineEngine.train_batch:  # a subclass may run what DeepSpeed runs
            refuse_patches(self, kwargs.get("model"))
        choose_checkpoint_function(**kwargs)
        refuse_idle_stages(**kwargs)
        tie_all_weights(kwargs["model"], kwargs["model"].tied_comms)  # for DeepSpeed's own PipelineModule
        super().__init__(*args, **kwargs)
        del self.dp_group_loss  # DeepSpeed's mean loss of each replica, which would stay 0 here

        # Cached, because DeepSpeed computes these again at each call.
        self._is_last_stage = self.is_last_stage()
        self._replicas = self.grid.get_data_parallel_group()
        reads_data = self._is_last_stage or self.stage_id == 0
        self._replica_hosts = host_group(self._replicas) if reads_data and self.dp_world_size > 1 else None
        self._reduction = choose_reduction(self)
        self.set_batch_fn(getattr(self.module, "_megatron_batch_fn", None))

        self._chunks: int = getattr(self.module, "chunks", 1)
        self.schedule = checked_schedule(self)
        self._proven_micro_batches = {self.micro_batches}  # checked_schedule has proven the schedule for these
        if self._reduction.averages and not is_reduction_replaced(type(self)):
            check_factor(self, lambda _: self.loss_factor, pipeline=True)  # measures how DeepSpeed scales gradients
        self._eval_schedule = partial(schedule.forward_only, chunks=self._chunks)
        has_queues = has_message_queues(self.device)
        # The plan of a schedule and a number of micro-batches; repeated calls return the same object.
        plan_of = partial(plan_of_stage, self.stage_id, self.num_stages, has_queues, self.dynamic_shape)
        self._cached_plan = cache(plan_of)
        self._current_plan: StagePlan | None = None
        self._neighbours = connect_neighbours(self.grid, self.device, self._chunks)
        self._contract = exchange_declarations(self)

        self.observers = Observers()
        self.watchdog: Watchdog | None = None
        if dist.get_world_size() > 1:
            timeout = float(self._config.pipeline.get("timeout", 600.0))
            self.watchdog = Watchdog(timeout, self._describe, device=self.device)
            self.observers.append(self.watchdog)
        self._saved_state = PipelineState(self.module, self.grid)
        self._losses = Losses(self.device)
        self.progress = Progress(self.device, self.steps_per_print(), self.wall_clock_breakdown())
        self.observers.append(self.progress)
        disable_timer_sync(self)

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Run one optimizer step over `gradient_accumulation_steps` micro-batches of `data_iter`.

        data_iter: by default, an iterator of the loader made from `training_data` or given to `set_dataloader`.
        Returns the loss over the global batch, a scalar in fp32 (fp64 if `loss_fn` returns fp64), equal on every rank.
        Raises DataEnded, a StopIteration, if the data end. If they end before the first micro-batch, all stages raise
        it, and the model is unchanged.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch() needs gradients; under no_grad(), use eval_batch()")
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.module.train()
        timer = self.timers(TRAIN_BATCH_TIMER)
        if len(getattr(timer, "event_timers", ())) >= MAX_TIMED_STEPS:  # they grow until a progress line resets them
            timer.reset()
        timer.start()
        try:
            with self._watched(), self._discarding_gradients(), self.observers.around("train_batch"):
                self._train_step()
        finally:
            timer.stop()
        report_losses(self, "train_loss", self.agg_train_loss)
        progress_line = self.progress.step(self.global_steps, self.train_batch_size(), self._losses.all_means)
        if progress_line:  # every `steps_per_print` steps
            timer.elapsed(reset=True)  # as DeepSpeed does then
            if self.global_rank == 0:
                say(progress_line)
        return self.agg_train_loss

    def _train_step(self) -> None:
        """Run the passes of a step, reduce gradients and losses over the ranks, and step the optimizer."""
        if self.optimizer is None:
            raise RuntimeError(
                f"stage {self.stage_id} has no optimizer: give each rank an optimizer, even if all weights are frozen"
            )
        plan = self._cached_plan(self.schedule, self.micro_batches)
        if plan is not self._current_plan:  # in the first step, or when the number of micro-batches changes
            self._current_plan = plan
            self._reduction.plan(plan.instructions)
        with self.observers.around("Begin"):
            self._begin(self.micro_batches)
        self._run(plan)
        with self.observers.around("Reduce"):
            self.observers.waiting("reducing gradients over tied layers and replicas")
            self._reduction.finish()
        with self.observers.around("Loss"):  # the squared gradient norm travels with them, unless it is None
            self._share_losses(self._squared_norm_to_share())
        with self.observers.around("Step"):
            self._config.wall_clock_breakdown = False  # DeepSpeed would print times of this part, besides `progress`
            self.observers.waiting("in the optimizer step")
            instruction_handler(self, "OptimizerStep", "_exec_optimizer_step")()
        self.agg_train_loss = self._losses.read()  # after the optimizer step, so that the device has work meanwhile
        self.agg_additional_losses = self._losses.additional or None
        self.total_loss = self._losses.local_sum  # this replica's sum on the last stage, else None, as in DeepSpeed

    def _run(self, plan: StagePlan) -> None:
        """Run the instructions of this stage in a step, each by its method in _HANDLERS."""
        microbatches = self._step.microbatches
        self._neighbours.begin_step(plan.instructions, plan.post_after)
        for instruction, next_instruction in zip_longest(plan.instructions, plan.instructions[1:]):
            run = getattr(self, self._HANDLERS[type(instruction)])
            with self.observers.around(instruction):
                run(instruction)
            if microbatches[instruction.micro_chunk].is_empty:
                del microbatches[instruction.micro_chunk]
            if type(instruction) in PASS_COST:  # the instruction is a pass, not a message
                self._neighbours.after_pass()
            if not isinstance(next_instruction, SENDS):  # sends go before receives, because other stages wait for them
                self._neighbours.post()
        assert not microbatches, (
            f"stage {self.stage_id} still holds tensors of {list(microbatches)} after the last instruction of a step"
        )
        with self.observers.around("Flush"):
            self.observers.waiting("waiting until its last messages are sent")
            self._neighbours.end_step()

    def _inputs_of(self, instruction: Instruction) -> Any:
        """Return the inputs of a chunk's layers, which the layers may modify in place."""
        if self._neighbours.has_previous(instruction.chunk):
            microbatch = self._step.microbatches[instruction.micro_chunk]
            received = microbatch.received
            if not self.module.training:  # in training, `_send_grad` needs `received` later
                microbatch.received = []
            inputs = tuple(non_leaf_view(each.tensor) for each in received)
            return inputs[0] if received[0].is_bare else inputs  # as the layer before returned it
        inputs = self._step.batches.inputs(instruction.micro)  # the first layers get the data
        if self.module.activation_checkpoint_interval > 0 and self._config.pipeline.get("use_reentrant"):
            inputs = views_requiring_grad(inputs)  # else re-entrant checkpointing would compute no gradients
        return inputs

    def _forward(self, instruction: Instruction) -> None:
        """Run a chunk on a micro-batch; store its outputs for the next stage or, on the last one, add its loss."""
        chunk = instruction.chunk
        inputs = self._inputs_of(instruction)
        chunk_argument = {"chunk": chunk} if self._chunks > 1 else {}  # DeepSpeed's PipelineModule has no chunks
        with autocast(self):
            outputs = self.module(inputs, **chunk_argument)
        if not self.module.training:
            checkpointing.reset()  # frees the activation buffers, as no backward pass follows
        if self._neighbours.has_next(chunk):
            self._keep(instruction, outputs)
        else:
            self._add_loss(instruction, outputs, self._step.batches.labels(instruction.micro))

    def _keep(self, instruction: Instruction, outputs: Any) -> None:
        """Check the outputs for the next stage and store them until they are sent."""
        tensors = as_tuple(outputs)
        declared = self._contract.outputs[instruction.chunk]
        check_tensors(tensors, declared, f"stage {self.stage_id}, outputs", self.device)
        splits = [each.split for each in declared] if declared else [False] * len(tensors)
        self._step.microbatches[instruction.micro_chunk].keep_outputs(tensors, splits, isinstance(outputs, Tensor))

    def _add_loss(self, instruction: Instruction, outputs: Any, labels: Any) -> None:
        """Compute a micro-batch's loss on the last stage, add it to the step's losses, and store it for `_backward`."""
        self.outputs = None if self.module.training else outputs  # of the last micro-batch at the end, for eval_batch
        if not self._step.compute_loss:  # eval_batch returns the outputs of all micro-batches instead
            self.fwd_outputs.append(in_full(outputs))  # with the logits that an output layer has deferred to its loss
            return
        if self.module.loss_fn is None:
            require_scalar_loss(outputs, self.stage_id)
            loss = outputs
        else:
            loss = self.module.loss_fn(outputs, labels)
        additional = self.module.get_additional_losses() or {}  # DeepSpeed's own method returns None
        total_loss = self._losses.add(loss, additional)
        self.loss = total_loss.detach()
        self.fwd_outputs.append(self.loss)
        if self.module.training:
            require_gradient(total_loss, outputs, self.stage_id)
            scaled_loss = total_loss * self._step.scale
            if self.fp16_enabled():
                scaled_loss = self.scale(scaled_loss)  # by the loss scale
            self._step.microbatches[instruction.micro_chunk].edges = [get_gradient_edge(scaled_loss)]

    def _backward(self, instruction: Instruction) -> None:
        """Backpropagate from the loss of a micro-batch, or from a chunk's outputs with the received gradients."""
        roots, grads = self._step.microbatches[instruction.micro_chunk].take_roots()
        if roots:  # else no output of this chunk has a gradient
            with self._reduction.accumulating(instruction):
                torch.autograd.backward(roots, grads or None)  # a loss has no received gradient

    def _send_activation(self, instruction: Instruction) -> None:
        """Send a micro-batch's outputs and, in training, expect their gradients with the same layout."""
        micro_chunk = instruction.micro_chunk
        neighbours = self._neighbours
        microbatch = self._step.microbatches[micro_chunk]
        outputs = microbatch.to_send
        microbatch.to_send = []
        if self.dynamic_shape:  # each output has its own header
            run_end = micro_chunk.micro + 1
        elif neighbours.has_previous(micro_chunk.chunk):  # the outputs keep their layout while the inputs do
            run_end = neighbours.from_previous.run_ends[micro_chunk]
        else:
            run_end = self._step.batches.run_end(micro_chunk.micro)
        if self.module.training:  # before the send, since `expect` may allocate the gradient's buffer
            expected_grads = [BoundaryTensor(t.tensor, is_split=t.is_split) for t in outputs if t.needs_grad]
            layout = layout_of(expected_grads) if expected_grads else None
            neighbours.from_next.expect(micro_chunk, layout)
        neighbours.to_next.send_outputs(micro_chunk, run_end, outputs, f"stage {self.stage_id}")

    def _recv_activation(self, instruction: Instruction) -> None:
        """Receive a micro-batch's inputs, and check them against the declared boundary."""
        previous = self._neighbours.from_previous
        try:
            received = previous.take_inputs(instruction.micro_chunk)
        except DataEnded as end:
            self._announce_data_end(end)  # to the next stage
            raise
        for each in received:
            each.tensor.requires_grad_(each.needs_grad and torch.is_grad_enabled())
        self._step.microbatches[instruction.micro_chunk].received = received
        tensors = tuple(each.tensor for each in received)
        declared = self._contract.inputs[instruction.chunk]
        check_tensors(tensors, declared, f"stage {self.stage_id}, inputs from rank {previous.link.peer}")

    def _send_grad(self, instruction: Instruction) -> None:
        """Send the gradients of a micro-batch's inputs to the stage that sent these inputs."""
        microbatch = self._step.microbatches[instruction.micro_chunk]
        inputs = microbatch.inputs_with_grad
        microbatch.received = []
        if inputs:
            grads = [BoundaryTensor(pop_grad(each.tensor), is_split=each.is_split) for each in inputs]
            self._neighbours.to_previous.send(grads)

    def _recv_grad(self, instruction: Instruction) -> None:
        microbatch = self._step.microbatches[instruction.micro_chunk]
        if microbatch.edges:  # outputs without a gradient get no message
            microbatch.grads = [each.tensor for each in self._neighbours.from_next.take(instruction.micro_chunk)]

    _HANDLERS = {  # method names, so that a subclass can override them
        schedule.Forward: "_forward",
        schedule.Backward: "_backward",
        schedule.BackwardInput: "_backward_input",
        schedule.BackwardWeight: "_backward_weight",
        schedule.SendActivation: "_send_activation",
        schedule.RecvActivation: "_recv_activation",
        schedule.SendGrad: "_send_grad",
        schedule.RecvGrad: "_recv_grad",
    }

    def _watched(self) -> AbstractContextManager[None]:
        return self.watchdog.watching() if self.watchdog else nullcontext()

    def _describe(self, what: Any) -> str:
        return describe_activity(what, self.stage_id, self._neighbours)

    def _begin(self, micros: int, compute_loss: bool = True) -> None:
        """Prepare the micro-batches of a step and compute the factor by which losses are scaled."""
        refuse_patches(self, self.module, reduces=isinstance(self._reduction, OverlappedReduction))
        self.fwd_outputs: list[Any] = []
        if self.known_model.adopt_new_layers():
            wait_for_weights(self)  # layers put in later have no hooks that wait for gathered weights
        require_iterator(self.data_iterator, self.stage_id)
        is_first = self.stage_id == 0
        is_last = self._is_last_stage
        batches = Batches(self._read, micros, self.device, self.stage_id, needs_inputs=is_first, needs_labels=is_last)
        self._step = Step(batches, compute_loss)
        self._losses.begin(micros, self.dp_world_size)
        if not (is_first or is_last):
            return  # the stages between them read no data
        has_data = self._start_reading(batches)
        if not (has_data and is_last):
            return  # only the last stage computes losses; without data, it will receive the end that stage 0 announces
        if compute_loss and getattr(self.module.loss_fn, "count_targets", None) is not None:
            self._count_targets()
        self._step.scale = self.loss_factor / self._losses.divisor  # factor on each loss before its backward pass

    def _start_reading(self, batches: Batches) -> bool:
        """Read the first micro-batch, or with several stages all; return whether there is a first one.

        Reading may be a collective of the first and the last stage, so both read before either waits for messages of
        the other. Stage 0 must also know all shapes, since its headers announce runs of equal shapes. Without data, it
        raises DataEnded.
        """
        self.observers.waiting("reading its micro-batches")
        end = batches.end_on_any_replica(self._replica_hosts)
        if end is None:
            if self.num_stages > 1:
                batches.prefetch(batches.total)  # a pass that lacks its micro-batch raises DataEnded later
            return True
        if self.stage_id == 0:
            self._announce_data_end(end)
            raise end
        return False

    def _read(self) -> Any:
        """Return the next micro-batch of this rank's data, by DeepSpeed's method, which calls the `batch_fn`."""
        with self.observers.around("Read"):
            return self._next_batch()
