"""Peak memory of one rank of each stage, divided into weights, gradients, activations and other kinds of tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

from tds.bucket_launch import BUCKET_BYTES, BYTES_PER_REPLICA
from tds.schedule import BackwardInput, Forward

from ..config import Config
from ..config.ds_config import Resolved
from ..model.layers import Layer
from .activations import (
    backward_working,
    chunked_loss_kept,
    deferred_grad_bytes,
    kept_bytes,
    logits_bytes,
    recomputed_bytes,
    shared_table_bytes,
)
from .sizes import DTYPE_BYTES, Count, Shapes, Stage, StageSchedule, count_layers, in_flight, peak_in_flight

DEEPSPEED_BUCKET = 5 * 10**8  # DeepSpeed's default reduce_bucket_size, in elements
MUON_BATCH = 1 << 24  # elements that Muon steps together
DEEPSPEED_LIVE = 10**9  # DeepSpeed's default stage3_max_live_parameters, in elements


@dataclass(frozen=True)
class Memory:
    """Memory in bytes, by kind.

    working: temporary tensors of a backward pass, such as activation gradients and recomputed activations.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    communication: float
    working: float

    @property
    def total(self) -> float:
        """Sum of all kinds in bytes."""
        return float(sum(vars(self).values()))


def moment_elements(count: Count, config: Config) -> int:
    """Return the number of elements of the optimizer's moments on each model-parallel rank, before ZeRO shards them."""
    elements = count.held
    moments = 2 * elements  # Adam keeps two moments of each parameter
    if config.optim.optimizer == "sgd":
        moments = elements
    elif config.optim.optimizer == "muon":  # of the matrices that Muon steps, it keeps only the momentum
        moments -= count.hidden
    if config.optim.ema_decay:
        moments += elements  # the average counts as a moment
    return moments


def state_bytes(count: Count, config: Config, resolved: Resolved, replicas: int) -> tuple[float, float, float]:
    """Return the bytes of (weights, gradients, optimizer states) that one rank keeps between passes.

    The bytes of gradients are those that a rank keeps after one micro-batch, for the later micro-batches of the step.
    count: number of parameters of the rank before ZeRO shards them.
    replicas: number of ranks over which ZeRO shards. Experts are sharded only over the ranks that hold the same ones.
    """
    parts = count.by_replicas(replicas, config.parallel.expert_parallel_size)
    bytes_by_part = [_state_bytes_of(*part, config, resolved) for part in parts]
    # The parts (w1, g1, s1) and (w2, g2, s2) give the sums w1 + w2, g1 + g2 and s1 + s2.
    weights, gradients, optimizer_states = map(sum, zip(*bytes_by_part, strict=True))
    return weights, gradients, optimizer_states


def _state_bytes_of(count: Count, replicas: int, config: Config, resolved: Resolved) -> tuple[float, float, float]:
    """Return what `state_bytes` returns, for parameters that all have the same number of replicas."""
    weight_width = DTYPE_BYTES[resolved.precision]
    state_width = max(weight_width, 4)  # bytes of a number in optimizer states: they are fp32, in an fp64 run fp64
    elements = count.held
    weights = elements * weight_width
    adam_elements = elements - count.hidden if config.optim.optimizer == "muon" else elements
    saved_bytes = len(config.optim.rounded_moments) * adam_elements * (state_width - 2)  # bf16 has 2 bytes
    states = float(moment_elements(count, config) * state_width - saved_bytes)
    if resolved.zero_stage == 0:  # in fp32 or fp64, without master weights; gradients have the dtype of the weights
        return weights, weights, states
    share = elements / replicas
    states /= replicas
    # 16-bit weights have fp32 master weights. DeepSpeed's ZeRO keeps such a copy even of fp32 weights.
    if weight_width < state_width or not resolved.distributed_optimizer:
        states += state_width * share
    if resolved.zero_stage == 1:  # shards the optimizer states only
        grad_width = state_width if resolved.distributed_optimizer or resolved.precision == "bf16" else weight_width
        return weights, elements * grad_width, states
    gradients = _grad_width(resolved) * share
    if resolved.zero_stage == 2:
        return weights, gradients, states
    return share * weight_width, gradients, states


def _grad_width(resolved: Resolved) -> int:
    """Return the bytes of an element of the gradients that DeepSpeed's ZeRO 2 and 3 keep: those of fp16 are fp16."""
    width = DTYPE_BYTES[resolved.precision]
    return width if resolved.precision == "fp16" else max(width, 4)


class _StepMemory:
    """The memory of a rank of `stage` at those moments of a step at which it may be highest."""

    def __init__(self, stage: Stage, config: Config, resolved: Resolved, replicas: int, accelerated: bool) -> None:
        self.stage = stage
        self.config = config
        self.resolved = resolved
        self.replicas = replicas
        self.layers = stage.layers
        self.shapes = Shapes(config, resolved.precision, accelerated, resolved.zero_stage)
        p = config.parallel
        gas = config.train.gas
        # Without a pipeline, a backward pass follows each forward pass, as in 1f1b on a single stage.
        name = p.pipeline_schedule if p.pipe_parallel_size else "1f1b"
        schedule = StageSchedule(name, p.pipeline_extra_warmup, p.chunks, stage.number, p.stages, gas)
        num_in_flight = in_flight(schedule)
        self.weights, self.gradients, self.optimizer = state_bytes(stage.count, config, resolved, replicas)
        self.trained = stage.count
        if resolved.param_rules:
            from .frozen import count_trained

            self.trained = count_trained(stage.layers, resolved.param_rules, config)
            _, self.gradients, self.optimizer = state_bytes(self.trained, config, resolved, replicas)
        self.has_earlier_gradients = gas > num_in_flight / p.chunks
        # `held_gradients` exist when a backward pass begins: those of earlier micro-batches. Between steps, gradients
        # stay with DeepSpeed's ZeRO 3, and sums in fp32 with its ZeRO 1.
        # The stage of DeepSpeed's ZeRO; 0 if there is none, or if tds' DistributedOptimizer shards the optimizer.
        self.deepspeed_zero = 0 if resolved.distributed_optimizer else resolved.zero_stage
        gradients_stay = self.deepspeed_zero == 3 or (self.deepspeed_zero == 1 and resolved.precision == "bf16")
        self.held_gradients = self.gradients if self.has_earlier_gradients or gradients_stay else 0.0
        self.bucket_bytes = max(BUCKET_BYTES, BYTES_PER_REPLICA * replicas)  # minimum size of a bucket of gradients
        micro_batch_bytes = kept_bytes(self.shapes, self.layers)
        self.kept_activations = num_in_flight * micro_batch_bytes / p.chunks
        self.kept_activations += shared_table_bytes(self.shapes, self.layers)
        deferred_grads = deferred_grad_bytes(self.shapes, self.layers)
        _, num_deferred_early = peak_in_flight(Forward, schedule)
        self.kept_activations += num_deferred_early * deferred_grads
        # The first stage has no gradients of inputs, and computes those of its weights at once.
        deferred_in_flight, num_deferred = peak_in_flight(BackwardInput, schedule) if stage.number else (0, 0)
        self.deferred_activations = deferred_in_flight * micro_batch_bytes + num_deferred * deferred_grads
        self.communication = self._communication_bytes(num_in_flight)
        self.has_head = self.layers[-1].name == "head"
        self.logits = self.loss_temporaries = self.pending_logits = 0.0
        if self.has_head:
            self.logits, self.loss_temporaries = logits_bytes(self.shapes)
            # The passes before the last one wait for their backward passes. Logits in chunks have left only gradients.
            num_waiting = in_flight(schedule, chunk=p.chunks - 1) - 1  # of the last chunk, which has the head
            self.pending_logits = num_waiting * (chunked_loss_kept(self.shapes) or self.logits)

    def _memory(
        self, gradients: float, communication: float, kept: float = 0.0, logits: float = 0.0, working: float = 0.0
    ) -> Memory:
        return Memory(self.weights, gradients, self.optimizer, max(kept, 0.0), logits, communication, working)

    def _communication_bytes(self, num_in_flight: int) -> float:
        """Return the bytes of buckets of gradients, of weights gathered by ZeRO 3, and of messages between stages."""
        shapes = self.shapes
        total = self._all_bucket_bytes()
        if self.resolved.zero_stage == 3 and self.replicas > 1:
            total += shapes.width * min(self.stage.count.held, DEEPSPEED_LIVE)  # gathered weights
        if self.config.parallel.stages > 1:
            num_received = num_in_flight if self.stage.number else 0  # the first stage receives no activations
            # For each micro-batch, a stage sends hidden states, in T5's decoder also the encoder's output.
            last_layer = self.layers[-1]
            sent = shapes.hidden(shapes.layer_tokens(last_layer))
            if shapes.in_decoder(last_layer):
                sent += shapes.hidden(shapes.tokens[0])
            # Besides received inputs and sent outputs of the passes in flight, allow for 3 messages in transit.
            total += (num_received + num_in_flight + 3) * sent
        return total

    def _all_bucket_bytes(self) -> float:
        """Return the bytes of the buckets in which DeepSpeed's ZeRO collects gradients; ZeRO 1 has none for bf16."""
        resolved = self.resolved
        sums_in_fp32 = resolved.zero_stage == 1 and resolved.precision == "bf16"
        if sums_in_fp32 or not self.deepspeed_zero:
            return 0.0
        # Without overlap_comm in the ds_config, only ZeRO 3 overlaps reductions with computations, on accelerators.
        default_overlap = resolved.zero_stage == 3 and self.shapes.accelerated
        overlap_comm = resolved.deepspeed["zero_optimization"].get("overlap_comm", default_overlap)
        # One buffer is filled while the other is reduced, if they overlap. In a pipeline, reductions follow the passes.
        buffers = 2 if overlap_comm and self.config.parallel.stages == 1 else 1
        return buffers * self._bucket_bytes()

    def _bucket_bytes(self) -> float:
        """Return the bytes of a buffer in which DeepSpeed's ZeRO collects gradients."""
        elements = self.resolved.deepspeed["zero_optimization"].get("reduce_bucket_size", DEEPSPEED_BUCKET)
        return self.shapes.width * float(elements)

    def loss(self) -> Memory:
        """Return the memory while the loss of the last micro-batch in flight is computed."""
        # DeepSpeed's ZeRO 1 and 2 allocate their bucket with the first gradient. ZeRO 2 frees it in each micro-batch.
        bucket_comes_later = self.deepspeed_zero == 2 or (self.deepspeed_zero == 1 and not self.has_earlier_gradients)
        communication = 0.0 if bucket_comes_later else self.communication
        logits = self.pending_logits + self.logits + self.loss_temporaries
        return self._memory(self.held_gradients, communication, self.kept_activations, logits)

    def backward(self, index: int) -> Memory:
        """Return the memory in a layer's backward pass: earlier layers have activations, later ones have gradients."""
        kept_activations = self.kept_activations - kept_bytes(self.shapes, self.layers[index + 1 :])
        gradients = self.held_gradients
        if not gradients:  # no earlier micro-batch has left any, so only the later layers have gradients
            remaining = count_layers(self.layers[: index + 1], self.config).held
            gradients = self.gradients * (1 - remaining / self.stage.count.held)
        if self.resolved.distributed_optimizer:  # it allocates a whole bucket of gradients with the first of them
            gradients = min(self.gradients, gradients + self.bucket_bytes)
        layer = self.layers[index]
        working = backward_working(self.shapes, layer)  # gradients of activations
        # The gradient of a matrix is a separate tensor until it is added to `gradients`. The largest matrix counts.
        working += count_layers([layer], self.config).largest * self.shapes.width
        working += recomputed_bytes(self.shapes, self.layers) + self._partition_of_micro_batch()
        return self._memory(gradients, self.communication, kept_activations, self.pending_logits, working)

    def _partition_of_micro_batch(self) -> float:
        """Return the bytes in which DeepSpeed's ZeRO 2 collects its share of a later micro-batch's gradients.

        It allocates them with the first full bucket. Gradients in bf16 are added to the sums in fp32 without them.
        """
        uses_partition = self.resolved.zero_stage == 2 and self.resolved.precision != "bf16"
        fills_bucket = self._bucket_bytes() < self.trained.held * self.shapes.width
        if uses_partition and fills_bucket and self.has_earlier_gradients:
            return self.trained.touched_elements(self.replicas) * _grad_width(self.resolved)
        return 0.0

    def deferred(self) -> Memory:
        """Return the memory when most gradients of weights are deferred; the pipeline schedule zb-h1 defers them."""
        peaks = [backward_working(self.shapes, self.layers[index]) for index in _turning_points(self.layers)]
        working = max(peaks, default=0.0)  # a stage may have no transformer layers
        return self._memory(self.held_gradients, self.communication, self.deferred_activations, working=working)

    def reduction(self) -> Memory:
        """Return the memory while gradients are reduced, when no activations are left."""
        buffers = 0.0
        if self.deepspeed_zero:
            buffers = self._copied_by_deepspeed()
        elif self.replicas > 1 and not self.resolved.zero_stage:
            buffers = min(self.gradients, self.bucket_bytes + self.stage.count.largest * self.shapes.width)
        elif self.replicas > 1 and not self.shapes.accelerated:
            buffers = self.weights  # gloo copies all weights while it gathers them
        return self._memory(self.gradients, self.communication + buffers)

    def _copied_by_deepspeed(self) -> float:
        """Return the bytes that DeepSpeed's ZeRO 1 and 2 copy while they reduce gradients; ZeRO 3 copies nothing."""
        resolved = self.resolved
        if resolved.zero_stage == 3:
            return 0.0
        if resolved.zero_stage == 1 and resolved.precision == "bf16":  # all sums in fp32 are copied to a flat tensor
            return self.gradients if self.replicas > 1 else 0.0
        # All others have a bucket. Its gradients, or all if they do not fill it, are copied before replicas sum them.
        count = self.trained
        bucket_bytes = self._bucket_bytes()
        flat_copy = min(bucket_bytes, count.held * self.shapes.width) if self.replicas > 1 else 0.0
        if resolved.precision == "bf16":  # ZeRO 2, which copies one matrix after the other to fp32 (4 bytes)
            return flat_copy + 4.0 * count.largest
        if resolved.precision == "fp16" and self.config.parallel.stages > 1:  # a pipeline has a second bucket
            flat_copy = max(flat_copy, bucket_bytes)
        # In fp16 and fp32, this rank's share of the gradients is copied, too: each matrix that touches it as a whole.
        return flat_copy + count.touched_elements(self.replicas) * _grad_width(resolved)

    def embedding(self) -> Memory:
        """Return the memory when an embedding's gradient is added to a tied output layer's or an earlier one."""
        table_bytes = self.stage.count.largest * self.shapes.width
        # The new gradient is temporary. So is the one it is added to, if ZeRO 2 or 3 keeps only a share of the sum.
        working = table_bytes * (1 if self.resolved.zero_stage < 2 else 2)
        if self.resolved.distributed_optimizer and self.shapes.width < 4 and not self.shapes.accelerated:
            working += self.stage.count.largest * 4  # a CPU widens what it adds to a sum in fp32
        kept_activations = self.kept_activations - kept_bytes(self.shapes, self.layers)
        return self._memory(self.gradients, self.communication, kept_activations, working=working)

    def step(self) -> Memory:
        """Return the memory while the optimizer steps."""
        buffers = 0.0
        for part, replicas in self.trained.by_replicas(self.replicas, self.config.parallel.expert_parallel_size):
            if self.deepspeed_zero:
                buffers += _copied_in_step(part.held, replicas, self.resolved, self.shapes)
        if self.config.optim.optimizer == "sgd":  # torch's SGD adds the weight decay to a copy of the gradients
            buffers = self._with_decay(buffers)
        if self.config.optim.optimizer == "muon":
            shares = self.replicas if self.resolved.zero_stage else 1
            buffers += _updates_of_muon(self.trained, shares, self.shapes)
        communication = self.communication
        if self.resolved.zero_stage == 2:
            communication -= self._all_bucket_bytes()  # freed before the step
        return self._memory(self.gradients, communication, working=buffers)

    def _with_decay(self, copied_bytes: float) -> float:
        """Return the bytes of copies while SGD steps: torch adds the weight decay to a copy of the gradients."""
        # Only with DeepSpeed's ZeRO, the gradients are one large tensor.
        if not (self.deepspeed_zero and self.config.optim.weight_decay):
            return copied_bytes
        # ZeRO steps this rank's share of the parameters, in at least fp32 (4 bytes).
        decayed_bytes = max(self.shapes.width, 4) * self.trained.held / self.replicas
        # Here the other copies are freed before SGD makes its copy, so only the larger of the two counts.
        if self.resolved.zero_stage == 2 or self.shapes.width < 4:
            return max(copied_bytes, decayed_bytes)
        return copied_bytes + decayed_bytes


def _copied_in_step(elements: int, replicas: int, resolved: Resolved, shapes: Shapes) -> float:
    """Return the bytes of copies that DeepSpeed's ZeRO makes of gradients, or with ZeRO 3 of weights, to step.

    ZeRO 1 and 2 copy the gradients of a rank's share to fp32. Gradients in fp16 are first copied to one flat tensor,
    always by ZeRO 2, but by ZeRO 1 only on a single replica.
    """
    if resolved.zero_stage == 3:
        return _copied_by_zero3(elements, replicas, resolved, shapes)
    share = elements / replicas
    is_flattened = resolved.precision == "fp16" and (resolved.zero_stage == 2 or replicas == 1)
    flat_width = shapes.width if is_flattened else 0
    return (max(shapes.width, 4) + flat_width) * share


def _copied_by_zero3(elements: int, replicas: int, resolved: Resolved, shapes: Shapes) -> float:
    """Return the bytes of copies in a step of DeepSpeed's ZeRO 3.

    With replicas, weights are gathered while others are still gathered. Without, the gradients are flattened, and those
    in fp16 also copied to fp32. The search for infinities copies the gradients and makes a bool tensor of their size.
    """
    share = elements / replicas
    width = _grad_width(resolved)
    is_fp16 = resolved.precision == "fp16"
    if replicas > 1:
        copied_bytes = float(shapes.width * min(elements, DEEPSPEED_LIVE))
    else:
        copied_bytes = share * width
        if is_fp16:
            copied_bytes += share * 4
    if is_fp16 or shapes.ranks > 1:
        copied_bytes = max(copied_bytes, share * (width + 1))  # a bool takes 1 byte
    return copied_bytes


def _updates_of_muon(count: Count, shares: int, shapes: Shapes) -> float:
    """Return the bytes of the updates that Muon computes together, before and after they are orthogonalised.

    Without Nesterov momentum, the momentum itself is orthogonalised. Tensor-parallel ranks also exchange shards for
    whole matrices. shares: number of ranks that divide the matrices.
    """
    batch_elements = min(count.hidden / shares, MUON_BATCH + count.largest)
    # The copies are updates before and after; with tensor parallelism also those sent, received and whole.
    copies = 2 if shapes.ranks == 1 else 5
    if not shapes.config.optim.muon_nesterov:
        copies -= 1
    return copies * batch_elements * shapes.width


def _turning_points(layers: Sequence[Layer]) -> list[int]:
    """Return the ends of the first and the last run of each kind of transformer layers (with experts or without).

    In a run of equal layers, activations and gradients change steadily, so memory peaks at one of its ends.
    """
    ends_by_kind: dict[tuple[type, bool], list[int]] = {}  # of the runs 1 to 3 and 5 to 6: [1, 3, 5, 6]
    for i, layer in enumerate(layers):
        if layer.repeated:
            ends = ends_by_kind.setdefault((layer.cls, layer.routes), [])
            if ends and ends[-1] == i - 1:  # the layer continues a run
                ends[-1] = i
            else:
                ends += [i, i]
    points = set[int]()
    for ends in ends_by_kind.values():
        points.update(ends[:2], ends[-2:])
    return sorted(points)


def rank_memory(
    config: Config, resolved: Resolved, world: int, accelerated: bool, stages: Sequence[Stage]
) -> list[Memory]:
    """Return the memory of a rank of each stage at the moment of a step at which it is highest, in order of stages."""
    replicas = config.parallel.data_parallel_size(world) * config.parallel.context_parallel_size  # copies of a weight
    memories = []
    for stage in stages:
        step_memory = _StepMemory(stage, config, resolved, replicas, accelerated)
        candidates = [step_memory.backward(index) for index in _turning_points(step_memory.layers)]
        if step_memory.has_head:
            candidates.append(step_memory.loss())
        is_tied = step_memory.has_head and config.model.tie_embeddings
        if stage.number == 0 and (is_tied or step_memory.held_gradients):
            candidates.append(step_memory.embedding())  # the head or an earlier micro-batch has left a gradient
        candidates += [step_memory.deferred(), step_memory.reduction(), step_memory.step()]
        memories.append(max(candidates, key=lambda memory: memory.total))
    return memories
