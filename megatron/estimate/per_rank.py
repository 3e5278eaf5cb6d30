"""Peak memory of one rank of each stage, divided into weights, gradients, activations and other kinds of tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

from tds.bucket_launch import BUCKET_BYTES, BYTES_A_REPLICA
from tds.schedule import Backward, BackwardInput, BackwardWeight, Forward, Instruction, schedule_of
from tds.timetable import most_in_flight

from ..config import Config
from ..config.ds_config import Resolved
from ..model.layers import Layer
from .activations import (
    WIDTHS,
    Shapes,
    computed_again,
    deferred_kept,
    inner_working,
    kept_by,
    logits_bytes,
    transformer_kept,
)
from .sizes import Count, Stage, count_layers

DEEPSPEED_BUCKET = 5 * 10**8  # DeepSpeed's default reduce_bucket_size, in elements
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


@lru_cache(maxsize=65536)
def _instructions(name: str, extra: int, chunks: int, stage: int, stages: int, micros: int) -> list[Instruction]:
    """Return the instructions of a stage, with fewer micro-batches if a shorter schedule has the same steady state."""
    few = micros
    steady = name in ("1f1b", "interleaved", "zb-h1")
    if steady and micros > 6 * stages * (1 + extra) and micros % stages == 0:
        few = 4 * stages * (1 + extra)
    schedule = schedule_of({"schedule": name, "extra_warmup": extra}, chunks)
    return list(schedule(stage, stages, few))


@lru_cache(maxsize=65536)
def in_flight(
    name: str, extra: int, chunks: int, stage: int, stages: int, micros: int, chunk: int | None = None
) -> int:
    """Return the maximum number of forward passes whose activations a stage keeps at the same time.

    A forward pass takes one micro-batch through one of the `chunks` groups of layers on the stage. The function finds
    the maximum in the schedule of the stage.
    name: --pipeline-schedule. extra: --pipeline-extra-warmup. micros: number of micro-batches.
    chunk: count only the passes through this group of layers; None counts those of all groups.
    """
    if stages == 1:
        return 1
    plan = _instructions(name, extra, chunks, stage, stages, micros)
    return most_in_flight([each for each in plan if chunk in (None, each.chunk)])


@lru_cache(maxsize=65536)
def deferred(name: str, extra: int, chunks: int, stage: int, stages: int, micros: int) -> int:
    """Return of how many micro-batches the weight gradients are yet to be computed (zb-h1) when most are in flight."""
    if stages == 1:
        return 0
    alive = waiting = 0
    fullest = (0, 0)
    for each in _instructions(name, extra, chunks, stage, stages, micros):
        alive += isinstance(each, Forward) - isinstance(each, (Backward, BackwardWeight))
        waiting += isinstance(each, BackwardInput) - isinstance(each, BackwardWeight)
        if isinstance(each, Forward):
            fullest = max(fullest, (alive, waiting))
    return fullest[1]


def moments_of(count: Count, config: Config) -> int:
    """Return the number of elements of the optimizer's moments on each model-parallel rank, before ZeRO shards them.

    The average of --ema-decay counts as a moment.
    """
    moments = 2 * count.held
    if config.optim.optimizer == "sgd":
        moments = count.held
    elif config.optim.optimizer == "muon":
        moments -= count.hidden
    if config.optim.ema_decay:
        moments += count.held
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
    if zero == 2:
        return numbers * width, exact * share, moments + copy
    return share * width, exact * share, moments + copy


def _communication(stage: Stage, config: Config, resolved: Resolved, replicas: int, x: Shapes, flying: int) -> float:
    numbers = stage.count.held
    width = x.width
    found = 0.0
    if _deepspeed_zero(resolved):
        section = resolved.deepspeed["zero_optimization"]
        overlaps = section.get("overlap_comm", resolved.zero_stage == 3 and x.accelerated)
        buffers = 2 if overlaps and config.parallel.stages == 1 else 1
        found += buffers * _bucket(resolved, width)
    if resolved.zero_stage == 3:
        found += width * min(numbers, DEEPSPEED_LIVE)  # gathered weights
    if config.parallel.stages > 1:
        found += (2 * flying + 3) * _border(stage, config, x)
    return found


def _deepspeed_zero(resolved: Resolved) -> bool:
    """Return whether DeepSpeed's ZeRO, not tds' DistributedOptimizer, shards the optimizer."""
    return resolved.zero_stage > 0 and not resolved.distributed_optimizer


def _bucket(resolved: Resolved, width: int) -> float:
    """Return the bytes of a buffer in which DeepSpeed's ZeRO collects gradients. width: bytes of an activation.

    ZeRO 1 collects its fp32 sums of bf16 gradients, ZeRO 2 and 3 the gradients themselves.
    """
    elements = float(resolved.deepspeed["zero_optimization"].get("reduce_bucket_size", DEEPSPEED_BUCKET))
    summed = resolved.zero_stage == 1 and resolved.precision == "bf16"
    return elements * (4 if summed else width)


def _border(stage: Stage, config: Config, x: Shapes) -> float:
    """Return the bytes that a stage sends to the next stage for each micro-batch.

    A stage sends its hidden states. A stage in the decoder of T5 also sends the output of the encoder.
    """
    tokens = x.of_layer(stage.layers[-1])
    sent = x.hidden(tokens)
    if config.is_t5 and tokens == x.tokens[1]:
        sent += x.hidden(x.tokens[0])
    return sent


def stage_memory(stage: Stage, config: Config, resolved: Resolved, replicas: int, accelerated: bool) -> Memory:
    """Return the peak memory of a step on a rank of `stage`.

    replicas: number of ranks with a copy of the same weights: data-parallel size x context-parallel size.
    """
    x = Shapes(config, resolved.precision, accelerated)
    p = config.parallel
    weights, gradients, optimizer = states(stage.count, config, resolved, replicas)
    layers = stage.layers
    schedule = p.pipeline_schedule, p.pipeline_extra_warmup, p.virtual_pipeline_size
    flying = in_flight(*schedule, stage.number, p.stages, config.train.gas)
    theirs = _deepspeed_zero(resolved)
    # tds' ZeRO 1 and DeepSpeed's fp32 sums of bf16 gradients stay between steps.
    stays = resolved.zero_stage == 1 and (not theirs or resolved.precision == "bf16")
    later = config.train.gas > flying / p.virtual_pipeline_size  # True if gradients of earlier micro-batches exist
    waiting = gradients if stays or later or resolved.zero_stage == 3 else 0.0
    kept = flying * kept_by(x, layers) / p.virtual_pipeline_size
    postponed = deferred(*schedule, stage.number, p.stages, config.train.gas)
    if postponed:
        kept += postponed * deferred_kept(x, layers)
    talk = _communication(stage, config, resolved, replicas, x, flying)
    heads = in_flight(*schedule, stage.number, p.stages, config.train.gas, p.virtual_pipeline_size - 1)
    logits, beside = logits_bytes(x) if layers[-1].name == "head" else (0.0, 0.0)
    waiting_logits = (heads - 1) * logits
    moments = []
    for at in _turning_points(layers):
        # The backward pass has reached the layer `at`: its activations and those of earlier layers are still kept.
        after = layers[at + 1 :]
        left = kept - kept_by(x, after)
        summed = waiting or gradients * (1 - count_layers(layers[: at + 1], config).held / stage.count.held)
        working = inner_working(x, layers[at]) + stage.count.largest * x.width + computed_again(x, layers)
        moments.append(Memory(weights, summed, optimizer, max(left, 0.0), waiting_logits, talk, working))
    if layers[-1].name == "head":
        # DeepSpeed's ZeRO 1 and 2 allocate their bucket together with the first gradient.
        quiet = talk if not theirs or resolved.zero_stage == 3 or later else 0.0
        moments.append(Memory(weights, waiting, optimizer, kept, waiting_logits + logits + beside, quiet, 0.0))
    reduced = 0.0
    if resolved.zero_stage == 0 and replicas > 1:
        reduced = min(gradients, max(BUCKET_BYTES, BYTES_A_REPLICA * replicas) + stage.count.largest * x.width)
    if theirs and p.stages > 1:
        reduced = _bucket(resolved, x.width)  # under a pipeline, DeepSpeed allocates another for the reduction
    moments.append(Memory(weights, gradients, optimizer, 0.0, 0.0, talk + reduced, 0.0))
    return max(moments, key=lambda m: m.total)


def _turning_points(layers: Sequence[Layer]) -> list[int]:
    """Return the indices of the first and the last layer of each run of equal transformer layers.

    Between them, activations and gradients change steadily, so memory peaks at one of them.
    """
    found = []
    for at, layer in enumerate(layers):
        before = layers[at - 1].cls if at else None
        after = layers[at + 1].cls if at + 1 < len(layers) else None
        if layer.repeated and not before is after is layer.cls:
            found.append(at)
    return found


def rank_memory(
    config: Config, resolved: Resolved, world: int, accelerated: bool, stages: Sequence[Stage]
) -> list[Memory]:
    """Return the peak memory of a rank of each stage, in the order of stages."""
    p = config.parallel
    replicas = p.data_parallel_size(world) * p.context_parallel_size
    return [stage_memory(stage, config, resolved, replicas, accelerated) for stage in stages]


__all__ = ["Memory", "in_flight", "rank_memory", "stage_memory", "states", "transformer_kept"]
