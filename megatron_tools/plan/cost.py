"""Prediction of the time of a training step.

It adds up the times of matmuls, memory traffic, collectives, stage boundaries and the pipeline bubble.

The inputs are the model's shapes and the cluster's data sheet. All other constants are fields of `Efficiency`, each of
which can be replaced by a measured value.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

from megatron.config import Config
from megatron.config.ds_config import Resolved
from megatron.estimate.activations import Shapes
from megatron.estimate.sizes import Count, Stage, padded_vocabulary
from megatron.model.layers import Layer
from megatron.model.work import lengths
from tds.schedule import schedule_of
from tds.timetable import times

from .cluster import Cluster, Link

FORWARD, BACKWARD = 1.0, 2.0  # durations of a forward and a backward pass in a timetable


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Fractions of the data-sheet figures that a run achieves. The defaults serve all clusters and are fitted to none.

    matmul: fraction of the peak FLOP/s that wide matmuls reach. narrow: width of the matmuls that reach half of that
    fraction. attention: fraction of the peak FLOP/s that fused attention reaches. memory, link: fractions of the memory
    and link bandwidths.
    hidden_passes, inner_passes, score_passes: how often a layer's forward pass, apart from matmuls, reads or writes the
    hidden states, the MLP's inner activations and the attention scores. score_passes is 0 for fused kernels.
    overlap: fraction of the gradient reduction hidden by the last backward pass.
    step_seconds: constant overhead of a step.
    """

    matmul: float = 0.75
    narrow: float = 220.0
    attention: float = 0.40
    memory: float = 0.80
    link: float = 0.75
    hidden_passes: float = 10.0
    inner_passes: float = 2.0
    score_passes: float = 0.0
    overlap: float = 0.6
    step_seconds: float = 0.0


DEFAULT = Efficiency()


@dataclass(frozen=True)
class Seconds:
    """Seconds that a micro-batch's forward and backward pass take on one stage, by kind of work."""

    matmuls: float
    attention: float
    memory: float
    tensor_parallel: float
    context_parallel: float
    expert_parallel: float
    weights: float  # ZeRO 3's all-gathers of weights
    boundary: float

    @property
    def total(self) -> float:
        """Sum of the seconds of all kinds of work."""
        return float(sum(getattr(self, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Cost:
    """Time and work of one step on `devices` devices.

    model_flops: FLOPs of the forward and backward pass on all devices. done_flops: the same with recomputation.
    """

    step: float
    bubble: float
    stages: tuple[Seconds, ...]
    gradients: float
    optimizer: float
    model_flops: float
    done_flops: float
    tokens: int
    devices: int
    peak: float
    boundary_bytes: float
    gradient_bytes: float
    collective_bytes: float
    expert_bytes: float  # that a rank sends in all-to-alls per micro-batch

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all devices together."""
        return self.tokens / self.step

    @property
    def tflops(self) -> float:
        """TFLOP/s per device, including recomputation as in most publications."""
        return self.done_flops / self.step / self.devices / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization (Chowdhery et al. 2022), without recomputation."""
        return self.model_flops / self.step / self.devices / self.peak

    def days(self, tokens: float) -> float:
        """Return how many days training on `tokens` tokens takes."""
        return tokens / self.tokens_per_second / 86400


@lru_cache(maxsize=65536)
def pipeline_units(name: str, extra: int, chunks: int, stages: int, micros: int) -> float:
    """Return how long a pipeline step takes, in units of a micro-batch's forward and backward pass on one stage.

    The result is the length of a timetable of the schedule `name` in which all stages are equally fast. If there are
    many micro-batches, a timetable of fewer micro-batches is computed, and each one left out adds one unit.
    extra: value of --pipeline-extra-warmup.
    """
    if stages == 1:
        return float(micros)
    schedule = schedule_of({"schedule": name, "extra_warmup": extra}, chunks)
    few = micros
    steady = name in ("1f1b", "gpipe", "interleaved")
    if steady and micros > 6 * stages * (1 + extra) and micros % stages == 0:
        few = 4 * stages * (1 + extra)
    spans = times([list(schedule(stage, stages, few)) for stage in range(stages)], FORWARD, BACKWARD)
    return max(span.end for span in spans) / (FORWARD + BACKWARD) + micros - few


def all_reduce_seconds(size: float, ranks: int, link: Link, e: Efficiency) -> float:
    """Return the seconds of a ring all-reduce of `size` bytes.

    Each byte is sent and received 2 (n - 1) / n times (Patarasuk and Yuan 2009).
    """
    if ranks == 1:
        return 0.0
    return 2 * (ranks - 1) / ranks * size / (link.gigabytes_per_second * 1e9 * e.link) + 2 * (ranks - 1) * min(
        link.latency_seconds, 1e-5
    )


def expert_bytes(x: Shapes, layer: Layer) -> float:
    """Return the bytes of rows that a rank sends to other ranks in one all-to-all of a layer with evenly used experts.

    A micro-batch needs two all-to-alls in its forward pass, and two in its backward pass.
    """
    m = x.config.model
    ranks = x.config.parallel.expert_parallel_size
    rows = x.of_layer(layer) * m.experts_per_token if layer.routes else 0
    return rows * m.hidden_size * x.width * (ranks - 1) / ranks


def _exchange_seconds(x: Shapes, layer: Layer, link: Link, e: Efficiency) -> float:
    """Return the seconds of one all-to-all of a layer; 0 without experts and without expert parallelism."""
    if not expert_bytes(x, layer):
        return 0.0
    others = x.config.parallel.expert_parallel_size - 1
    sent = expert_bytes(x, layer) / (link.gigabytes_per_second * 1e9 * e.link)
    return sent + others * min(link.latency_seconds, 1e-5)


def _inner_bytes(x: Shapes, layer: Layer) -> float:
    """Return the bytes of a micro-batch's inner activations in the layer's MLP, or in all experts of its tokens."""
    m = x.config.model
    width = m.expert_ff_size * (m.experts_per_token + m.num_shared_experts) if layer.routes else m.ff_size
    return x.of_layer(layer) * width / x.ranks * x.width


def _touched(x: Shapes, layer: Layer, e: Efficiency) -> float:
    """Return the bytes that the forward pass of a transformer layer reads and writes, apart from matmuls."""
    m = x.config.model
    tokens = x.of_layer(layer)
    batch = x.config.train.batch_size
    found = e.hidden_passes * x.hidden(tokens) + e.inner_passes * _inner_bytes(x, layer)
    if layer.routes:
        # Rows are sorted by expert, and their outputs back, with a read and a write each. The ranks of the experts sort
        # what arrives, too.
        copies = 4 if x.config.parallel.expert_parallel_size == 1 else 8
        found += copies * tokens * m.experts_per_token * m.hidden_size * x.width
    scores = batch * m.num_attention_heads / x.ranks * (tokens / batch) ** 2 * x.width
    return found + e.score_passes * scores


def _width_factor(x: Shapes, e: Efficiency) -> float:
    """Return which fraction of `e.matmul` a rank's matmuls reach. The fraction is smaller for narrower matrices."""
    m = x.config.model
    inner = m.expert_ff_size if m.num_experts else m.ff_size
    narrowest = min(m.num_attention_heads * m.head_size / x.ranks, m.hidden_size, inner / x.ranks)
    return narrowest / (narrowest + e.narrow)


def layer_flops(x: Shapes, layer: Layer) -> tuple[float, float]:
    """Return (matmul FLOPs, attention FLOPs) of a rank's forward pass of a micro-batch through `layer`."""
    c = x.config
    b = x.config.train.batch_size
    m = x.config.model
    encoder, decoder = lengths(c)
    split = x.ranks * c.parallel.context_parallel_size
    if not layer.repeated:
        tokens = x.of_layer(layer)
        return (
            2.0 * tokens * m.hidden_size * padded_vocabulary(c, x.ranks) / x.ranks if layer.name == "head" else 0.0
        ), 0.0
    inner = m.num_attention_heads * m.head_size
    s = decoder if layer.cls.__name__ == "DecoderBlock" else encoder
    scores = 2 * s * s * inner + (2 * s * encoder * inner if layer.cls.__name__ == "DecoderBlock" else 0)
    return 2.0 * b * (layer.work - scores) / split, 2.0 * b * scores / split


def stage_seconds(
    stage: Stage, x: Shapes, resolved: Resolved, cluster: Cluster, replicas: int, e: Efficiency
) -> tuple[Seconds, float, float]:
    """Return (seconds, model FLOPs, FLOPs with recomputation) of a rank's passes of one micro-batch through `stage`."""
    m = x.config.model
    p = x.config.parallel
    peak = cluster.peak(resolved.precision)
    hbm = cluster.memory_bandwidth * 1e9 * e.memory
    again = bool(x.config.recomputed_layers)
    matmuls = attention = memory = tensor = context = experts = model = done = 0.0
    link = cluster.link(x.ranks, 1)
    group = cluster.link(p.expert_parallel_size, x.ranks)
    for layer in stage.layers:
        dense, scores = layer_flops(x, layer)
        repeats = 4 if again and layer.repeated else 3
        model = model + 3 * (dense + scores)
        done = done + repeats * (dense + scores)
        matmuls += repeats * dense / (peak * e.matmul * _width_factor(x, e))
        tokens = x.of_layer(layer)
        if layer.repeated:
            more = 1 if m.checkpoint_attention and not again else 0
            if m.recompute_modules:  # recomputing modules repeats the QKV matmul and memory-bound operations
                qkv = (
                    2.0
                    * tokens
                    * m.hidden_size
                    * (m.num_attention_heads + 2 * m.key_value_heads)
                    * m.head_size
                    / x.ranks
                )
                extra = qkv if "qkv" in m.recompute_modules else 0.0
                done = done + extra
                matmuls = matmuls + extra / (peak * e.matmul * _width_factor(x, e))
                memory += len(m.recompute_modules) * 2 * (x.hidden(tokens) + _inner_bytes(x, layer) / 3) / hbm
            attention += (repeats + more) * scores / (peak * (e.attention if not e.score_passes else e.matmul / 2))
            memory += repeats * _touched(x, layer, e) / hbm
            experts += (6 if again else 4) * _exchange_seconds(x, layer, group, e)
            whole = tokens * m.hidden_size * x.width
            sums = (2 if again else 0) + 4 + (2 if layer.cls.__name__ == "DecoderBlock" else 0)
            tensor += sums * all_reduce_seconds(whole, x.ranks, link, e)
            keys = 2 * tokens * m.key_value_heads * m.head_size / x.ranks * x.width * p.context_parallel_size
            context += 1.5 * all_reduce_seconds(
                keys, p.context_parallel_size, cluster.link(p.context_parallel_size, x.ranks), e
            )
        elif layer.name == "head":
            memory += 6 * tokens * padded_vocabulary(x.config, x.ranks) / x.ranks * x.width / hbm
    gathered = 0.0
    if resolved.zero_stage == 3:
        gathered = 1.5 * all_reduce_seconds(stage.count.held * x.width, replicas, cluster.link(replicas, x.ranks), e)
    boundary = 0.0
    if p.stages > 1:
        wire = cluster.link(p.stages, x.ranks * replicas)
        one = boundary_bytes(stage, x) / (wire.gigabytes_per_second * 1e9 * e.link) + wire.latency_seconds
        boundary = 2 * one * p.virtual_pipeline_size
    return Seconds(matmuls, attention, memory, tensor, context, experts, gathered, boundary), model, done


def boundary_bytes(stage: Stage, x: Shapes) -> float:
    """Return the bytes that a rank sends to the next stage per micro-batch.

    A rank sends its shard of the hidden states. In a T5 decoder, it also sends its shard of the encoder's output.
    """
    tokens = x.of_layer(stage.layers[-1])
    states = tokens + (x.tokens[0] if x.config.is_t5 and tokens == x.tokens[1] else 0)
    return states * x.config.model.hidden_size * x.width / x.ranks


def cost_of(
    config: Config, resolved: Resolved, world: int, cluster: Cluster, stages: Sequence[Stage], e: Efficiency = DEFAULT
) -> Cost:
    """Return the cost of one step. Raises ValueError if the cluster's file gives no peak for the run's dtype."""
    p = config.parallel
    x = Shapes(config, resolved.precision, cluster.accelerated)
    replicas = p.data_parallel_size(world) * p.context_parallel_size
    found = [stage_seconds(stage, x, resolved, cluster, replicas, e) for stage in stages]
    units = pipeline_units(
        p.pipeline_schedule, p.pipeline_extra_warmup, p.virtual_pipeline_size, p.stages, config.train.gas
    )
    slowest = max(seconds.total for seconds, _, _ in found)
    held = max(stage.count.held for stage in stages)
    exact = 4 if resolved.zero_stage <= 1 else x.width
    parts = [stage.count.by_replicas(replicas, p.expert_parallel_size) for stage in stages]
    sums, share = (
        max(each) for each in zip(*(_updates(part, x, exact, resolved, cluster, e) for part in parts), strict=True)
    )
    hidden = min(sums * e.overlap, slowest * 2 / 3) if p.overlap_grad_reduce else 0.0
    if resolved.zero_stage >= 2:  # DeepSpeed's ZeRO 2 and 3 reduce gradients after every micro-batch.
        sums = sums * config.train.gas
        hidden = hidden * config.train.gas
    stepped = (share * 28 + held * 2 * x.width) / (cluster.memory_bandwidth * 1e9 * e.memory)
    samples = config.train_batch_size(world)
    step = units * slowest + sums - hidden + stepped + e.step_seconds
    each = config.train.gas * x.ranks * replicas
    collective = 4.0 * max(x.tokens) * config.model.hidden_size * x.width * max((s.repeated for s in stages), default=0)
    return Cost(
        step=step,
        bubble=1 - config.train.gas / units,
        stages=tuple(seconds for seconds, _, _ in found),
        gradients=sums - hidden,
        optimizer=stepped,
        model_flops=sum(model for _, model, _ in found) * each,
        done_flops=sum(done for _, _, done in found) * each,
        tokens=samples * sum(lengths(config)),
        devices=world,
        peak=cluster.peak(resolved.precision),
        boundary_bytes=max(boundary_bytes(stage, x) for stage in stages) if p.stages > 1 else 0.0,
        gradient_bytes=held * float(exact),
        collective_bytes=collective if x.ranks > 1 else 0.0,
        expert_bytes=max(4 * sum(expert_bytes(x, layer) for layer in stage.layers) for stage in stages),
    )


def _updates(
    parts: Sequence[tuple[Count, int]], x: Shapes, exact: int, resolved: Resolved, cluster: Cluster, e: Efficiency
) -> tuple[float, float]:
    """Return (seconds of the gradients' all-reduces, number of parameters that a rank's optimizer updates).

    parts: result of `Count.by_replicas`. exact: bytes of an element of a gradient.
    """
    sums = share = 0.0
    for count, replicas in parts:
        sums += all_reduce_seconds(count.held * exact, replicas, cluster.link(replicas, x.ranks), e)
        share += count.held / (replicas if resolved.zero_stage else 1)
    return sums, share
