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
from megatron.estimate.sizes import Count, Shapes, Stage, padded_vocabulary
from megatron.model.layers import Layer
from megatron.model.work import lengths
from tds.schedule import schedule_of
from tds.timetable import times

from .cluster import Cluster, Link


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Fractions of the data-sheet figures that a run achieves. The defaults serve all clusters.

    matmul: fraction of the sustained peak FLOP/s that wide matmuls reach. narrow: width of the matmuls that reach half
    of that fraction. attention: fraction of that peak that fused attention reaches. memory, link: fractions of the
    memory and link bandwidths.
    hidden_passes, inner_passes, score_passes: how often a layer's forward pass, apart from matmuls, reads or writes the
    hidden states, the MLP's inner activations and the attention scores. score_passes is 0 for fused kernels.
    overlap: fraction of the gradient reduction hidden by the last backward pass.
    backward: duration of a backward pass, as a multiple of that of a forward pass. Only the bubbles of schedules with
    separate gradients of weights depend on it.
    step_seconds: constant overhead of a step.
    """

    matmul: float = 0.75
    narrow: float = 220.0
    attention: float = 0.50
    memory: float = 0.80
    link: float = 0.75
    hidden_passes: float = 10.0
    inner_passes: float = 2.0
    score_passes: float = 0.0
    overlap: float = 0.6
    backward: float = 2.0
    step_seconds: float = 0.0


DEFAULT = Efficiency()


@dataclass
class Seconds:
    """Seconds that a micro-batch's forward and backward pass take on one stage, by kind of work."""

    matmuls: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    tensor_parallel: float = 0.0
    context_parallel: float = 0.0
    expert_parallel: float = 0.0
    weights: float = 0.0  # ZeRO 3's all-gathers of weights
    boundary: float = 0.0

    @property
    def total(self) -> float:
        """Sum of the seconds of all kinds of work."""
        return float(sum(getattr(self, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Cost:
    """Time and work of one step on `devices` devices.

    passes: seconds of all forward and backward passes, with the pipeline's bubble.
    model_flops: FLOPs of the forward and backward pass on all devices. done_flops: the same with recomputation.
    """

    step: float
    passes: float
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
def pipeline_units(name: str, extra: int, chunks: int, stages: int, micros: int, backward: float = 2.0) -> float:
    """Return how long a pipeline step takes, in units of a micro-batch's forward and backward pass on one stage.

    The result is the length of a timetable of the schedule `name` in which all stages are equally fast. If there are
    many micro-batches, a timetable of fewer micro-batches is computed, and each one left out adds one unit.
    extra: value of --pipeline-extra-warmup. backward: duration of a backward pass; that of a forward pass is 1.
    """
    if stages == 1:
        return float(micros)
    schedule = schedule_of({"schedule": name, "extra_warmup": extra}, chunks)
    few = micros
    steady = name in ("1f1b", "gpipe", "interleaved")
    if steady and micros > 6 * stages * (1 + extra) and micros % stages == 0:
        few = 4 * stages * (1 + extra)
    plan = [list(schedule(stage, stages, few)) for stage in range(stages)]
    end = max(span.end for span in times(plan, 1.0, backward))
    return end / (1.0 + backward) + micros - few


def all_reduce_seconds(size: float, ranks: int, link: Link, e: Efficiency) -> float:
    """Return the seconds of a ring all-reduce of `size` bytes.

    Each byte is sent and received 2 (n - 1) / n times (Patarasuk and Yuan 2009).
    """
    if ranks == 1:
        return 0.0
    sent = 2 * (ranks - 1) / ranks * size
    return sent / (link.gigabytes_per_second * 1e9 * e.link) + 2 * (ranks - 1) * min(link.latency_seconds, 1e-5)


def expert_bytes(x: Shapes, layer: Layer) -> float:
    """Return the bytes of rows that a rank sends to other ranks in one all-to-all of a layer with evenly used experts.

    A micro-batch needs two all-to-alls in its forward pass, and two in its backward pass.
    """
    if not layer.routes:
        return 0.0
    m = x.config.model
    ranks = x.config.parallel.expert_parallel_size
    rows = x.of_layer(layer) * m.experts_per_token
    return rows * m.hidden_size * x.width * (ranks - 1) / ranks


def _exchange_seconds(x: Shapes, layer: Layer, cluster: Cluster, e: Efficiency) -> float:
    """Return the seconds of one all-to-all of a layer; 0 without experts and without expert parallelism.

    Rows for other nodes leave through the rank's own link, while rows for the rank's node go over the links inside it.
    """
    rows = expert_bytes(x, layer)
    if not rows:
        return 0.0
    ranks = x.config.parallel.expert_parallel_size
    near = cluster.ranks_in_a_node(ranks, x.ranks)
    outside = rows * (ranks - near) / (ranks - 1)
    slowest = cluster.wire(ranks, x.ranks)
    far_seconds = outside / (cluster.between.gigabytes_per_second * 1e9 * e.link)
    near_seconds = (rows - outside) / (cluster.inside.gigabytes_per_second * 1e9 * e.link)
    return max(far_seconds, near_seconds) + (ranks - 1) * min(slowest.latency_seconds, 1e-5)


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
    length = tokens / batch
    scores = batch * m.num_attention_heads / x.ranks * length**2 * x.width
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
    m = c.model
    if not layer.repeated:
        if layer.name != "head":
            return 0.0, 0.0
        return 2.0 * x.of_layer(layer) * m.hidden_size * padded_vocabulary(c, x.ranks) / x.ranks, 0.0
    encoder, decoder = lengths(c)
    inner = m.num_attention_heads * m.head_size
    if _is_decoder(layer):
        scores = 2 * decoder * decoder * inner + 2 * decoder * encoder * inner
    else:
        scores = 2 * encoder * encoder * inner
    batch = c.train.batch_size
    split = x.ranks * c.parallel.context_parallel_size
    return 2.0 * batch * (layer.work - scores) / split, 2.0 * batch * scores / split


def _is_decoder(layer: Layer) -> bool:
    """Return whether a layer is a T5's decoder layer, which has a cross-attention."""
    return layer.cls.__name__ == "DecoderBlock"


def stage_seconds(
    stage: Stage, x: Shapes, resolved: Resolved, cluster: Cluster, replicas: int, e: Efficiency
) -> tuple[Seconds, float, float]:
    """Return (seconds, model FLOPs, FLOPs with recomputation) of a rank's passes of one micro-batch through `stage`."""
    p = x.config.parallel
    rate = cluster.sustained_peak(resolved.precision) * e.matmul * _width_factor(x, e)
    hbm = cluster.memory_bandwidth * 1e9 * e.memory
    again = bool(x.config.recomputed_layers)
    model = 0.0
    done = 0.0
    found = Seconds()
    for layer in stage.layers:
        dense, scores = layer_flops(x, layer)
        repeats = 4 if again and layer.repeated else 3
        model += 3 * (dense + scores)
        done += repeats * (dense + scores)
        found.matmuls += repeats * dense / rate
        if layer.repeated:
            qkv = _recomputed_flops(x, layer)
            done += qkv
            found.matmuls += qkv / rate
            _add_block(found, layer, scores, x, resolved, cluster, e)
        elif layer.name == "head":
            logits = 6 * x.of_layer(layer) * padded_vocabulary(x.config, x.ranks) / x.ranks
            found.memory += logits * x.width / hbm
    if resolved.zero_stage == 3:
        # The weights are gathered for the forward and for the backward pass. A gather is half of an all-reduce.
        found.weights = all_reduce_seconds(stage.count.held * x.width, replicas, cluster.ring(replicas, x.ranks), e)
    if p.stages > 1:
        wire = cluster.wire(p.stages, x.ranks * replicas)
        one = boundary_bytes(stage, x) / (wire.gigabytes_per_second * 1e9 * e.link) + wire.latency_seconds
        found.boundary = 2 * one * p.virtual_pipeline_size
    return found, model, done


def _recomputed_flops(x: Shapes, layer: Layer) -> float:
    """Return the FLOPs of the matmuls that --recompute-modules repeats in a transformer layer's backward pass."""
    m = x.config.model
    if "qkv" not in m.recompute_modules:
        return 0.0
    heads = m.num_attention_heads + 2 * m.key_value_heads
    return 2.0 * x.of_layer(layer) * m.hidden_size * heads * m.head_size / x.ranks


def _add_block(
    found: Seconds, layer: Layer, scores: float, x: Shapes, resolved: Resolved, cluster: Cluster, e: Efficiency
) -> None:
    """Add the seconds of a transformer layer, apart from its matmuls. scores: FLOPs of its attention scores."""
    m = x.config.model
    p = x.config.parallel
    tokens = x.of_layer(layer)
    peak = cluster.sustained_peak(resolved.precision)
    hbm = cluster.memory_bandwidth * 1e9 * e.memory
    # Passes through the layer: forward, and twice as much backward, and forward again if the layer is recomputed.
    repeats = 3
    attentions = 4 if m.checkpoint_attention else 3
    reduced = 4
    exchanges = 4
    if x.config.recomputed_layers:
        repeats = 4
        attentions = 4
        reduced = 6
        exchanges = 6
    if _is_decoder(layer):
        reduced += 2
    found.memory += len(m.recompute_modules) * 2 * (x.hidden(tokens) + _inner_bytes(x, layer) / 3) / hbm
    found.memory += repeats * _touched(x, layer, e) / hbm
    reached = e.matmul / 2 if e.score_passes else e.attention
    found.attention += attentions * scores / (peak * reached)
    found.expert_parallel += exchanges * _exchange_seconds(x, layer, cluster, e)
    states = tokens * m.hidden_size * x.width
    found.tensor_parallel += reduced * all_reduce_seconds(states, x.ranks, cluster.ring(x.ranks, 1), e)
    context = p.context_parallel_size
    keys = 2 * tokens * m.key_value_heads * m.head_size / x.ranks * x.width * context
    found.context_parallel += 1.5 * all_reduce_seconds(keys, context, cluster.ring(context, x.ranks), e)


def boundary_bytes(stage: Stage, x: Shapes) -> float:
    """Return the bytes that a rank sends to the next stage per micro-batch.

    A rank sends its shard of the hidden states. In a T5 decoder, it also sends its shard of the encoder's output.
    """
    tokens = x.of_layer(stage.layers[-1])
    states = tokens
    if x.config.is_t5 and tokens == x.tokens[1]:
        states += x.tokens[0]
    return states * x.config.model.hidden_size * x.width / x.ranks


def cost_of(
    config: Config, resolved: Resolved, world: int, cluster: Cluster, stages: Sequence[Stage], e: Efficiency = DEFAULT
) -> Cost:
    """Return the cost of one step. Raises ValueError if the cluster's file gives no peak for the run's dtype."""
    p = config.parallel
    gas = config.train.gas
    x = Shapes(config, resolved.precision, cluster.accelerated)
    replicas = p.data_parallel_size(world) * p.context_parallel_size
    schedule = p.pipeline_schedule, p.pipeline_extra_warmup, p.virtual_pipeline_size
    units = pipeline_units(*schedule, p.stages, gas, e.backward)
    exact = 4 if resolved.zero_stage <= 1 else x.width
    seconds = []
    model = done = sums = share = boundary = exchanged = 0.0
    for stage in stages:
        passes, flops, repeated = stage_seconds(stage, x, resolved, cluster, replicas, e)
        seconds.append(passes)
        model += flops
        done += repeated
        parts = stage.count.by_replicas(replicas, p.expert_parallel_size)
        reduced, updated = _updates(parts, x, exact, resolved, cluster, e)
        sums = max(sums, reduced)
        share = max(share, updated)
        boundary = max(boundary, boundary_bytes(stage, x))
        exchanged = max(exchanged, 4 * sum(expert_bytes(x, layer) for layer in stage.layers))
    slowest = max(each.total for each in seconds)
    average = sum(each.total for each in seconds) / len(seconds)
    held = max(stage.count.held for stage in stages)
    hidden = min(sums * e.overlap, slowest * 2 / 3) if p.overlap_grad_reduce else 0.0
    gathered = 0.0
    if resolved.zero_stage >= 2:
        # DeepSpeed's ZeRO 2 and 3 scatter the sums of gradients, half of an all-reduce, after every micro-batch.
        # ZeRO 2 gathers the updated weights at the end of the step.
        gathered = sums / 2 if resolved.zero_stage == 2 else 0.0
        sums = sums * gas / 2
        hidden = hidden * gas / 2
    stepped = (share * 28 + held * 2 * x.width) / (cluster.memory_bandwidth * 1e9 * e.memory)
    ranks = x.ranks * replicas
    layers = max(stage.repeated for stage in stages)
    collective = 4.0 * max(x.tokens) * config.model.hidden_size * x.width * layers
    computing = gas * slowest + (units - gas) * average
    return Cost(
        passes=computing,
        step=computing + sums - hidden + gathered + stepped + e.step_seconds,
        bubble=1 - gas / units,
        stages=tuple(seconds),
        gradients=sums - hidden + gathered,
        optimizer=stepped,
        model_flops=model * (gas * ranks),
        done_flops=done * (gas * ranks),
        tokens=config.train_batch_size(world) * sum(lengths(config)),
        devices=world,
        peak=cluster.peak(resolved.precision),
        boundary_bytes=boundary if p.stages > 1 else 0.0,
        gradient_bytes=held * float(exact),
        collective_bytes=collective if x.ranks > 1 else 0.0,
        expert_bytes=exchanged,
    )


def _updates(
    parts: Sequence[tuple[Count, int]], x: Shapes, exact: int, resolved: Resolved, cluster: Cluster, e: Efficiency
) -> tuple[float, float]:
    """Return (seconds of the gradients' all-reduces, number of parameters that a rank's optimizer updates).

    parts: result of `Count.by_replicas`. exact: bytes of an element of a gradient.
    """
    sums = 0.0
    share = 0.0
    for count, replicas in parts:
        sums += all_reduce_seconds(count.held * exact, replicas, cluster.ring(replicas, x.ranks), e)
        shards = replicas if resolved.zero_stage else 1
        share += count.held / shards
    return sums, share
