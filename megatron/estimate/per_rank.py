"""Peak memory of one rank of each stage, divided into weights, gradients, activations and other kinds of tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from tds.bucket_launch import BUCKET_BYTES, BYTES_A_REPLICA
from tds.schedule import BackwardInput, Forward

from ..config import Config
from ..config.ds_config import Resolved
from ..model.layers import Layer
from .activations import (
    computed_again,
    deferred_kept,
    inner_working,
    kept_by,
    kept_of_chunks,
    logits_bytes,
    tables_of,
    transformer_kept,
)
from .sizes import WIDTHS, Count, Shapes, Stage, count_layers, fullest, in_flight

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
        return float(sum(getattr(self, f.name) for f in fields(self)))


def moments_of(count: Count, config: Config) -> int:
    """Return the number of elements of the optimizer's moments on each model-parallel rank, before ZeRO shards them.

    The average of --ema-decay counts as a moment.
    """
    one = count.held
    of_optimizer = {"sgd": one, "muon": 2 * one - count.hidden}
    moments = of_optimizer.get(config.optim.optimizer, 2 * one)
    if config.optim.ema_decay:
        moments += one
    return moments


def states(count: Count, config: Config, resolved: Resolved, replicas: int) -> tuple[float, float, float]:
    """Return the bytes of (weights, gradients, optimizer states) that one rank keeps between passes.

    The bytes of gradients are those that a rank keeps after one micro-batch, for the later micro-batches of the step.
    count: number of parameters of the rank before ZeRO shards them.
    replicas: number of ranks over which ZeRO shards. Experts are sharded only over the ranks that hold the same ones.
    """
    parts = count.by_replicas(replicas, config.parallel.expert_parallel_size)
    found = [_states(*part, config, resolved) for part in parts]
    weights, gradients, moments = map(sum, zip(*found, strict=True))
    return weights, gradients, moments


def _states(count: Count, replicas: int, config: Config, resolved: Resolved) -> tuple[float, float, float]:
    width = WIDTHS[resolved.precision]
    exact = max(width, 4)
    zero = resolved.zero_stage
    numbers = count.held
    moments = float(moments_of(count, config) * exact)
    share = numbers / replicas
    if zero == 0:
        return numbers * width, numbers * width, moments
    moments /= replicas
    # fp32 master weights; DeepSpeed's ZeRO keeps such a copy even if the weights are fp32
    copy = exact * share if width < exact or not resolved.distributed_optimizer else 0.0
    if zero == 1:
        summed = exact if resolved.distributed_optimizer or resolved.precision == "bf16" else width
        return numbers * width, numbers * summed, moments + copy
    gradients = _width_of_gradients(resolved) * share
    if zero == 2:
        return numbers * width, gradients, moments + copy
    return share * width, gradients, moments + copy


def _width_of_gradients(resolved: Resolved) -> int:
    """Return the bytes of an element of the gradients that DeepSpeed's ZeRO 2 and 3 keep: those of fp16 are fp16."""
    width = WIDTHS[resolved.precision]
    return width if resolved.precision == "fp16" else max(width, 4)


def _communication(stage: Stage, config: Config, resolved: Resolved, replicas: int, x: Shapes, flying: int) -> float:
    numbers = stage.count.held
    width = x.width
    found = _buckets(config, resolved, x)
    if resolved.zero_stage == 3 and replicas > 1:
        found += width * min(numbers, DEEPSPEED_LIVE)  # gathered weights
    if config.parallel.stages > 1:
        received = flying if stage.number else 0  # the first stage receives no activations
        found += (received + flying + 3) * _border(stage, config, x)
    return found


def _buckets(config: Config, resolved: Resolved, x: Shapes) -> float:
    """Return the bytes of the buckets of DeepSpeed's ZeRO. Its ZeRO 1 sums bf16 gradients in fp32 without one."""
    if not _deepspeed_zero(resolved):
        return 0.0
    zero = resolved.zero_stage
    if zero == 1 and resolved.precision == "bf16":
        return 0.0
    usual = zero == 3 and x.accelerated
    overlaps = resolved.deepspeed["zero_optimization"].get("overlap_comm", usual)
    buffers = 2 if overlaps and config.parallel.stages == 1 else 1
    return buffers * _bucket(resolved, x.width)


def _deepspeed_zero(resolved: Resolved) -> bool:
    """Return whether DeepSpeed's ZeRO, not tds' DistributedOptimizer, shards the optimizer."""
    return resolved.zero_stage > 0 and not resolved.distributed_optimizer


def _bucket(resolved: Resolved, width: int) -> float:
    """Return the bytes of a buffer in which DeepSpeed's ZeRO collects gradients. width: bytes of a gradient."""
    return width * float(resolved.deepspeed["zero_optimization"].get("reduce_bucket_size", DEEPSPEED_BUCKET))


def _border(stage: Stage, config: Config, x: Shapes) -> float:
    """Return the bytes that a stage sends to the next stage for each micro-batch.

    A stage sends its hidden states. A stage in the decoder of T5 also sends the output of the encoder.
    """
    tokens = x.of_layer(stage.layers[-1])
    sent = x.hidden(tokens)
    if config.is_t5 and tokens == x.tokens[1]:
        sent += x.hidden(x.tokens[0])
    return sent


class _Moments:
    """The memory of a rank of `stage` at those moments of a step at which it may be highest."""

    def __init__(self, stage: Stage, config: Config, resolved: Resolved, replicas: int, accelerated: bool) -> None:
        self.stage = stage
        self.config = config
        self.resolved = resolved
        self.replicas = replicas
        self.layers = stage.layers
        self.x = Shapes(config, resolved.precision, accelerated)
        p = config.parallel
        gas = config.train.gas
        name = p.pipeline_schedule if p.pipe_parallel_size else "1f1b"
        schedule = name, p.pipeline_extra_warmup, p.virtual_pipeline_size
        flying = in_flight(*schedule, stage.number, p.stages, gas)
        self.weights, self.gradients, self.optimizer = states(stage.count, config, resolved, replicas)
        self.later = gas > flying / p.virtual_pipeline_size  # True if gradients of earlier micro-batches exist
        self.waiting = self.gradients if self.later or self._gradients_stay() else 0.0
        self.kept = flying * kept_by(self.x, self.layers) / p.virtual_pipeline_size
        self.kept += tables_of(self.x, self.layers)
        of_deferred = deferred_kept(self.x, self.layers)
        self.kept += fullest(Forward, *schedule, stage.number, p.stages, gas)[1] * of_deferred
        # The first stage has no gradients of inputs, and computes those of its weights at once.
        alive, waiting = fullest(BackwardInput, *schedule, stage.number, p.stages, gas) if stage.number else (0, 0)
        self.kept_deferred = alive * kept_by(self.x, self.layers) + waiting * of_deferred
        self.talk = _communication(stage, config, resolved, replicas, self.x, flying)
        heads = in_flight(*schedule, stage.number, p.stages, gas, p.virtual_pipeline_size - 1)
        self.has_head = self.layers[-1].name == "head"
        self.logits, self.beside = logits_bytes(self.x) if self.has_head else (0.0, 0.0)
        # Their backward passes come later. With chunks, gradients are kept in place of logits.
        self.waiting_logits = (heads - 1) * (kept_of_chunks(self.x) or self.logits) if self.has_head else 0.0

    def _gradients_stay(self) -> bool:
        """Return whether gradients stay between steps: with ZeRO 3, and sums in fp32 with ZeRO 1."""
        zero = self.resolved.zero_stage
        summed = self.resolved.distributed_optimizer or self.resolved.precision == "bf16"
        return zero == 3 or (zero == 1 and summed)

    def _of(self, gradients: float, activations: float, logits: float, talk: float, working: float = 0.0) -> Memory:
        return Memory(self.weights, gradients, self.optimizer, activations, logits, talk, working)

    def loss(self) -> Memory:
        """Return the memory while the loss of the last micro-batch in flight is computed."""
        # DeepSpeed's ZeRO 1 and 2 allocate their bucket together with the first gradient. ZeRO 2 frees it after each
        # micro-batch.
        zero = self.resolved.zero_stage if _deepspeed_zero(self.resolved) else 0
        bucket_comes = zero == 2 or (zero == 1 and not self.later)
        talk = 0.0 if bucket_comes else self.talk
        return self._of(self.waiting, self.kept, self.waiting_logits + self.logits + self.beside, talk)

    def backward(self, at: int) -> Memory:
        """Return the memory in the backward pass of layer `at`: earlier layers keep their activations, later ones have
        gradients.
        """
        x = self.x
        left = self.kept - kept_by(x, self.layers[at + 1 :])
        before = count_layers(self.layers[: at + 1], self.config).held / self.stage.count.held
        gradients = self.waiting or self.gradients * (1 - before)
        largest = count_layers([self.layers[at]], self.config).largest
        working = inner_working(x, self.layers[at]) + largest * x.width
        working += computed_again(x, self.layers) + self._partition_of_micro_batch()
        return self._of(gradients, max(left, 0.0), self.waiting_logits, self.talk, working)

    def _partition_of_micro_batch(self) -> float:
        """Return the bytes in which DeepSpeed's ZeRO 2 collects its share of a later micro-batch's gradients.

        It allocates them with the first full bucket. Gradients in bf16 are added to the sums in fp32 without them.
        """
        count = self.stage.count
        is_full = _bucket(self.resolved, self.x.width) < count.held * self.x.width
        if self.resolved.zero_stage != 2 or not (self.later and is_full):
            return 0.0
        if self.resolved.precision == "bf16":
            return 0.0
        return count.touched(self.replicas) * _width_of_gradients(self.resolved)

    def deferred(self) -> Memory:
        """Return the memory when most gradients of weights are yet to be computed (zb-h1)."""
        working = 0.0
        for at in _turning_points(self.layers):
            working = max(working, inner_working(self.x, self.layers[at]))
        return self._of(self.waiting, self.kept_deferred, 0.0, self.talk, working)

    def reduction(self) -> Memory:
        """Return the memory while gradients are reduced, when no activations are left."""
        buffers = 0.0
        if _deepspeed_zero(self.resolved):
            buffers = self._copied_by_deepspeed()
        elif self.replicas > 1 and not self.resolved.zero_stage:
            launched = max(BUCKET_BYTES, BYTES_A_REPLICA * self.replicas) + self.stage.count.largest * self.x.width
            buffers = min(self.gradients, launched)
        elif self.replicas > 1 and not self.x.accelerated:
            buffers = self.weights  # gloo copies all weights while it gathers them
        return self._of(self.gradients, 0.0, 0.0, self.talk + buffers)

    def _copied_by_deepspeed(self) -> float:
        """Return the bytes that DeepSpeed's ZeRO 1 and 2 copy while they reduce gradients.

        The copies of a rank's share have all numbers of each matrix that touches the share. ZeRO 1 sums gradients in
        bf16 as one flat tensor in fp32, ZeRO 2 one matrix after the other. Under a pipeline, fp16 has a second bucket.
        """
        zero = self.resolved.zero_stage
        if zero == 3:
            return 0.0
        if zero == 1 and self.resolved.precision == "bf16":
            return self.gradients if self.replicas > 1 else 0.0
        count = self.stage.count
        bucket = _bucket(self.resolved, self.x.width)
        # The numbers in the bucket are copied once more before replicas sum them.
        flat = min(bucket, count.held * self.x.width) if self.replicas > 1 else 0.0
        if self.resolved.precision == "bf16":
            return flat + 4.0 * count.largest
        if self.resolved.precision == "fp16" and self.config.parallel.stages > 1:
            flat = max(flat, bucket)
        return flat + count.touched(self.replicas) * _width_of_gradients(self.resolved)

    def embedding(self) -> Memory:
        """Return the memory when the gradient of an embedding is added to that of the output layer, to which it is
        tied, or to that of earlier micro-batches.
        """
        rows = self.stage.count.largest * self.x.width
        # ZeRO 2 and 3 keep only a share of the sum.
        tensors = 1 if self.resolved.zero_stage < 2 else 2
        working = tensors * rows
        if self.resolved.distributed_optimizer and self.x.width < 4 and not self.x.accelerated:
            working += self.stage.count.largest * 4  # a CPU widens what it adds to a sum in fp32
        left = self.kept - kept_by(self.x, self.layers)
        return self._of(self.gradients, max(left, 0.0), 0.0, self.talk, working)

    def step(self) -> Memory:
        """Return the memory while the optimizer steps."""
        count = self.stage.count
        optimizer = self.config.optim.optimizer
        buffers = 0.0
        for part, replicas in count.by_replicas(self.replicas, self.config.parallel.expert_parallel_size):
            buffers += _copied_in_step(part.held, replicas, self.resolved, self.x)
        if optimizer == "sgd":
            buffers = self._with_decay(buffers)
        if optimizer == "muon":
            shares = self.replicas if self.resolved.zero_stage else 1
            buffers += _updates_of_muon(count, shares, self.x)
        talk = self.talk
        if self.resolved.zero_stage == 2:
            talk -= _buckets(self.config, self.resolved, self.x)  # freed after the last micro-batch
        return self._of(self.gradients, 0.0, 0.0, talk, buffers)

    def _with_decay(self, copied: float) -> float:
        """Return the bytes of copies while SGD steps: torch adds the weight decay to a copy of the gradients.

        With DeepSpeed's ZeRO, the gradients are one tensor. ZeRO 2 and 16-bit runs have freed other copies then.
        """
        if not (_deepspeed_zero(self.resolved) and self.config.optim.weight_decay):
            return copied
        width = max(self.x.width, 4)
        decayed = width * self.stage.count.held / self.replicas
        if self.resolved.zero_stage == 2 or self.x.width < 4:
            return max(copied, decayed)
        return copied + decayed


def _copied_in_step(numbers: int, replicas: int, resolved: Resolved, x: Shapes) -> float:
    """Return the bytes of copies that DeepSpeed's ZeRO makes of gradients, or with ZeRO 3 of weights, to step.

    ZeRO 1 and 2 copy the gradients of a rank's share to fp32, and flatten 16-bit ones before: ZeRO 1 only without
    replicas.
    """
    if not _deepspeed_zero(resolved):
        return 0.0
    share = numbers / replicas
    if resolved.zero_stage == 3:
        return _copied_by_zero3(numbers, replicas, resolved, x)
    flattens = resolved.precision == "fp16" and (resolved.zero_stage == 2 or replicas == 1)
    flat = x.width if flattens else 0
    return (max(x.width, 4) + flat) * share


def _copied_by_zero3(numbers: int, replicas: int, resolved: Resolved, x: Shapes) -> float:
    """Return the bytes of copies in a step of DeepSpeed's ZeRO 3.

    With replicas, weights are gathered while others are still gathered. Without, the gradients are flattened, and those
    in fp16 also copied to fp32. The search for infinities, with fp16 and with tensor parallelism, makes a copy of the
    gradients and their truth values.
    """
    share = numbers / replicas
    width = _width_of_gradients(resolved)
    is_fp16 = resolved.precision == "fp16"
    if replicas > 1:
        copied = float(x.width * min(numbers, DEEPSPEED_LIVE))
    else:
        copied = share * (width + 4 * is_fp16)
    if is_fp16 or x.ranks > 1:
        copied = max(copied, share * (width + 1))
    return copied


def _updates_of_muon(count: Count, shares: int, x: Shapes) -> float:
    """Return the bytes of the updates that Muon computes together, before and after they are orthogonalised.

    Without Nesterov momentum, the momentum itself is orthogonalised. Tensor-parallel ranks also exchange shards for
    whole matrices. shares: number of ranks that divide the matrices.
    """
    together = min(count.hidden / shares, MUON_BATCH + count.largest)
    copies = (2 if x.ranks == 1 else 5) - (not x.config.optim.muon_nesterov)
    return copies * together * x.width


def stage_memory(stage: Stage, config: Config, resolved: Resolved, replicas: int, accelerated: bool) -> Memory:
    """Return the peak memory of a step on a rank of `stage`.

    replicas: number of ranks with a copy of the same weights: data-parallel size x context-parallel size.
    """
    moments = _Moments(stage, config, resolved, replicas, accelerated)
    found = [moments.backward(at) for at in _turning_points(moments.layers)]
    if moments.has_head:
        found.append(moments.loss())
    is_tied = moments.has_head and config.model.tie_embeddings
    if stage.number == 0 and (is_tied or moments.waiting):
        found.append(moments.embedding())
    found += [moments.deferred(), moments.reduction(), moments.step()]
    return max(found, key=lambda memory: memory.total)


def _turning_points(layers: Sequence[Layer]) -> list[int]:
    """Return the indices of the first and the last layer of each run of equal transformer layers.

    Between them, activations and gradients change steadily, so memory peaks at one of them.
    """
    places: dict[type, list[int]] = {}
    for at, layer in enumerate(layers):
        if layer.repeated:
            places.setdefault(layer.cls, []).append(at)
    found = []
    for run in places.values():
        found.append(run[0])
        found.append(run[-1])
    return found


def rank_memory(
    config: Config, resolved: Resolved, world: int, accelerated: bool, stages: Sequence[Stage]
) -> list[Memory]:
    """Return the peak memory of a rank of each stage, in the order of stages."""
    p = config.parallel
    replicas = p.data_parallel_size(world) * p.context_parallel_size
    return [stage_memory(stage, config, resolved, replicas, accelerated) for stage in stages]


__all__ = ["Memory", "in_flight", "rank_memory", "stage_memory", "states", "transformer_kept"]
