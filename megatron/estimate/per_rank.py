"""Peak memory of one rank of each stage, divided into weights, gradients, activations and other kinds of tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

from tds.bucket_launch import BUCKET_BYTES, BYTES_A_REPLICA
from tds.schedule import schedule_of
from tds.timetable import most_in_flight

from ..config import Config
from ..config.ds_config import Resolved
from ..model.layers import Layer
from .activations import WIDTHS, Shapes, computed_again, inner_working, kept_by, logits_bytes, transformer_kept
from .sizes import Count, Stage

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
def in_flight(name: str, extra: int, chunks: int, stage: int, stages: int, micros: int) -> int:
    """Return the maximum number of forward passes whose activations a stage keeps at the same time.

    A forward pass takes one micro-batch through one of the `chunks` groups of layers on the stage. The function builds
    the schedule of the stage and finds the maximum in it. For many micro-batches, it uses a shorter schedule with the
    same steady state.
    name: --pipeline-schedule. extra: --pipeline-extra-warmup. micros: number of micro-batches.
    """
    if stages == 1:
        return 1
    few = micros
    steady = name in ("1f1b", "interleaved", "zb-h1")
    if steady and micros > 6 * stages * (1 + extra) and micros % stages == 0:
        few = 4 * stages * (1 + extra)
    schedule = schedule_of({"schedule": name, "extra_warmup": extra}, chunks)
    return most_in_flight(list(schedule(stage, stages, few)))


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
        return numbers * width, numbers * exact, moments + copy
    if zero == 2:
        return numbers * width, exact * share, moments + copy
    return share * width, exact * share, moments + copy


def _communication(stage: Stage, config: Config, resolved: Resolved, replicas: int, x: Shapes, flying: int) -> float:
    numbers = stage.count.held
    width = x.width
    found = 0.0
    if resolved.zero_stage >= 2:
        section = resolved.deepspeed["zero_optimization"]
        overlaps = section.get("overlap_comm", resolved.zero_stage == 3 and x.accelerated)
        bucket = width * float(section.get("reduce_bucket_size", DEEPSPEED_BUCKET))
        found += 2 * bucket if overlaps else bucket
    if resolved.zero_stage == 3:
        found += width * min(numbers, DEEPSPEED_LIVE)  # gathered weights
    if config.parallel.stages > 1:
        found += (2 * flying + 3) * _border(stage, config, x)
    return found


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
    ours = resolved.zero_stage == 1 and resolved.distributed_optimizer
    later = config.train.gas > flying / p.virtual_pipeline_size  # True if gradients of earlier micro-batches exist
    waiting = gradients if ours or later or resolved.zero_stage == 3 else 0.0
    kept = flying * kept_by(x, layers) / p.virtual_pipeline_size
    talk = _communication(stage, config, resolved, replicas, x, flying)
    moments = [_last_pass(x, layers, stage, weights, waiting, optimizer, kept, talk)]
    moments.append(_first_layer(x, layers, stage, (weights, gradients, optimizer), talk))
    if layers[-1].name == "head":
        logits, beside = logits_bytes(x)
        # ZeRO 2 allocates its bucket together with the first gradient.
        quiet = talk if resolved.zero_stage != 2 or later else 0.0
        moments.append(Memory(weights, waiting, optimizer, kept, logits + beside, quiet, 0.0))
    reduced = 0.0
    if resolved.zero_stage == 0 and replicas > 1:
        reduced = min(gradients, max(BUCKET_BYTES, BYTES_A_REPLICA * replicas) + stage.count.largest * x.width)
    moments.append(Memory(weights, gradients, optimizer, 0.0, 0.0, talk + reduced, 0.0))
    return max(moments, key=lambda m: m.total)


def _last_pass(
    x: Shapes,
    layers: Sequence[Layer],
    stage: Stage,
    weights: float,
    waiting: float,
    optimizer: float,
    kept: float,
    talk: float,
) -> Memory:
    """Return the memory during the backward pass of the stage's last transformer layer.

    At this time, the activations of all earlier layers are still kept.
    """
    places = [at for at, layer in enumerate(layers) if layer.repeated]
    if not places:
        return Memory(weights, waiting, optimizer, kept, 0.0, talk, 0.0)
    last = places[-1]
    after = kept_by(x, list(layers[last + 1 :]))
    working = inner_working(x, layers[last]) + stage.count.largest * x.width + computed_again(x, list(layers))
    return Memory(weights, waiting, optimizer, kept - after, 0.0, talk, working)


def _first_layer(
    x: Shapes, layers: Sequence[Layer], stage: Stage, kept_on: tuple[float, float, float], talk: float
) -> Memory:
    """Return the memory during the backward pass of the stage's first transformer layer.

    At this time, all gradients exist. Only the activations of this layer and of earlier layers are still kept.
    """
    at = next((at for at, layer in enumerate(layers) if layer.repeated), None)
    if at is None:
        return Memory(*kept_on, 0.0, 0.0, talk, 0.0)
    working = inner_working(x, layers[at]) + stage.count.largest * x.width + computed_again(x, list(layers))
    return Memory(*kept_on, kept_by(x, list(layers[: at + 1])), 0.0, talk, working)


def rank_memory(
    config: Config, resolved: Resolved, world: int, accelerated: bool, stages: Sequence[Stage]
) -> list[Memory]:
    """Return the peak memory of a rank of each stage, in the order of stages."""
    p = config.parallel
    replicas = p.data_parallel_size(world) * p.context_parallel_size
    return [stage_memory(stage, config, resolved, replicas, accelerated) for stage in stages]


__all__ = ["Memory", "in_flight", "rank_memory", "stage_memory", "states", "transformer_kept"]
