"""Prediction of the time of a training step.

It adds up the times of matmuls, memory traffic, collectives, stage boundaries and the pipeline bubble.

The inputs are the model's shapes and the cluster's data sheet. All other constants are fields of `Efficiency`, each of
which can be replaced by a measured value.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron.config import Config
from megatron.config.ds_config import Resolved
from megatron.estimate.sizes import Count, Shapes, Stage, vocabulary_rows
from megatron.model.layers import Layer
from megatron.model.work import sample_lengths
from tds.timetable import simulate_times

from ..report.timetable import instructions_of
from .cluster import Cluster
from .step_cost import Cost, Seconds


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
# Most latency that counts for a message of a collective. This is assumed, not measured. Of the clusters in
# configs/clusters, it lowers the latencies of 910a, 910b and laptop_cpu.
MAX_STEP_LATENCY = 1e-5


@lru_cache(maxsize=65536)
def pipeline_units(name: str, extra_warmup: int, chunks: int, stages: int, micros: int, backward: float) -> float:
    """Return how long a pipeline step takes, in units of a micro-batch's forward and backward pass on one stage.

    The result is the length of a timetable of the schedule `name` in which all stages are equally fast. If there are
    many micro-batches, a timetable of fewer micro-batches is computed, and each one left out adds one unit.
    extra_warmup: value of --pipeline-extra-warmup. backward: duration of a backward pass; that of a forward pass is 1.
    """
    if stages == 1:
        return float(micros)
    simulated = micros
    # These schedules reach a steady state, in which each further micro-batch adds one unit. A timetable of four times
    # as many micro-batches as warm up the pipeline contains it, and takes much less time to compute: for 4 stages and
    # 100 micro-batches, 16 are simulated and the other 84 add 84 units.
    reaches_steady_state = name in ("1f1b", "gpipe", "interleaved")
    warmup = stages * (1 + extra_warmup)
    # `interleaved` is regular for multiples of the stages, such as 4 * warmup.
    if reaches_steady_state and micros > 6 * warmup and micros % stages == 0:
        simulated = 4 * warmup
    plan = instructions_of(name, stages, simulated, chunks, extra_warmup)
    last_end = max(span.end for span in simulate_times(plan, 1.0, backward))
    # A forward pass takes 1 and a backward pass `backward`, so one unit is their sum.
    return last_end / (1.0 + backward) + micros - simulated


def all_reduce_seconds(size: float, ranks: int, stride: int, cluster: Cluster, e: Efficiency) -> float:
    """Return the seconds of a ring all-reduce of `size` bytes over `ranks` devices that are `stride` apart.

    Each byte is sent and received 2 (n - 1) / n times (Patarasuk and Yuan 2009).
    """
    if ranks == 1:
        return 0.0
    link = cluster.ring(ranks, stride)
    steps = 2 * (ranks - 1)
    sent = steps / ranks * size
    bandwidth = link.gigabytes_per_second * 1e9 * e.link
    # Each step of the ring has the latency of one message.
    return sent / bandwidth + steps * min(link.latency_seconds, MAX_STEP_LATENCY)


def expert_bytes(shapes: Shapes, layer: Layer) -> float:
    """Return the bytes of rows that a rank sends to other ranks in one all-to-all of a layer with evenly used experts.

    A micro-batch needs two all-to-alls in its forward pass, and two in its backward pass.
    """
    if not layer.routes:
        return 0.0
    m = shapes.config.model
    ranks = shapes.config.parallel.expert_parallel_size
    # Each of the layer's tokens on this rank becomes one row for each of its experts. With even use, the experts of the
    # other ranks get (ranks - 1) / ranks of the rows. shapes.width is the number of bytes of an element.
    rows = shapes.layer_tokens(layer) * m.experts_per_token
    return rows * m.hidden_size * shapes.width * (ranks - 1) / ranks


def _all_to_all_seconds(shapes: Shapes, layer: Layer, cluster: Cluster, e: Efficiency) -> float:
    """Return the seconds of one all-to-all of a layer; 0 without experts and without expert parallelism.

    Rows for other nodes leave through the rank's own link, while rows for the rank's node go over the links inside it.
    """
    sent_bytes = expert_bytes(shapes, layer)
    if not sent_bytes:
        return 0.0
    ranks = shapes.config.parallel.expert_parallel_size
    ranks_in_node = cluster.ranks_in_a_node(ranks, shapes.ranks)
    # The rows go to ranks - 1 other ranks in equal parts; ranks - ranks_in_node of these are on other nodes.
    bytes_to_other_nodes = sent_bytes * (ranks - ranks_in_node) / (ranks - 1)
    bytes_in_node = sent_bytes - bytes_to_other_nodes
    far_seconds = bytes_to_other_nodes / (cluster.between.gigabytes_per_second * 1e9 * e.link)
    near_seconds = bytes_in_node / (cluster.inside.gigabytes_per_second * 1e9 * e.link)
    slowest = cluster.slowest_link(ranks, shapes.ranks)
    # Both kinds of links work at the same time.
    latency = (ranks - 1) * min(slowest.latency_seconds, MAX_STEP_LATENCY)
    return max(far_seconds, near_seconds) + latency


def _mlp_activation_bytes(shapes: Shapes, layer: Layer) -> float:
    """Return the bytes of a micro-batch's inner activations in the layer's MLP, or in all experts of its tokens."""
    m = shapes.config.model
    width = m.expert_ff_size * (m.experts_per_token + m.num_shared_experts) if layer.routes else m.ff_size
    return shapes.layer_tokens(layer) * width / shapes.ranks * shapes.width


def _memory_traffic(shapes: Shapes, layer: Layer, e: Efficiency) -> float:
    """Return the bytes that the forward pass of a transformer layer reads and writes, apart from matmuls."""
    m = shapes.config.model
    tokens = shapes.layer_tokens(layer)
    batch_size = shapes.config.train.batch_size
    traffic = e.hidden_passes * shapes.hidden(tokens) + e.inner_passes * _mlp_activation_bytes(shapes, layer)
    if layer.routes:
        # Rows are sorted by expert, and their outputs back, with a read and a write each. The ranks of the experts sort
        # what arrives, too.
        copies = 4 if shapes.config.parallel.expert_parallel_size == 1 else 8
        traffic += copies * tokens * m.experts_per_token * m.hidden_size * shapes.width
    length = tokens / batch_size
    scores = batch_size * m.num_attention_heads / shapes.ranks * length**2 * shapes.width
    return traffic + e.score_passes * scores


def _narrow_efficiency(shapes: Shapes, e: Efficiency) -> float:
    """Return which fraction of `e.matmul` a rank's matmuls reach. The fraction is smaller for narrower matrices."""
    m = shapes.config.model
    # The narrowest side of the matrices of attention and MLP on a rank. At e.narrow, half of e.matmul is reached.
    inner = m.expert_ff_size if m.num_experts else m.ff_size
    narrowest = min(m.num_attention_heads * m.head_size / shapes.ranks, m.hidden_size, inner / shapes.ranks)
    return narrowest / (narrowest + e.narrow)


def layer_flops(shapes: Shapes, layer: Layer) -> tuple[float, float]:
    """Return (matmul FLOPs, attention FLOPs) of a rank's forward pass of a micro-batch through `layer`."""
    c = shapes.config
    m = c.model
    # Of the layers outside the stack, only the output matrix (head) has a large matmul: 2 FLOPs per weight and token.
    if not layer.repeated:
        if layer.name != "head":
            return 0.0, 0.0
        return 2.0 * shapes.layer_tokens(layer) * m.hidden_size * vocabulary_rows(c), 0.0
    encoder_length, decoder_length = sample_lengths(c)  # without a decoder, the sequence length and 0
    inner = m.num_attention_heads * m.head_size
    # The multiply-adds of queries with keys, and of scores with values: 2 x length x length x width.
    pairs = encoder_length * encoder_length  # number of pairs of a query and a key
    if _has_cross_attention(layer):
        pairs = decoder_length * (decoder_length + encoder_length)
    score_work = 2 * pairs * inner
    batch_size = c.train.batch_size
    shards = shapes.ranks * c.parallel.context_parallel_size
    # A multiply-add is two FLOPs, and layer.work counts the multiply-adds of one sample: of matmuls and of scores.
    return 2.0 * batch_size * (layer.work - score_work) / shards, 2.0 * batch_size * score_work / shards


def _has_cross_attention(layer: Layer) -> bool:
    """Return whether a layer is a T5's decoder layer, which has a cross-attention."""
    return layer.cls.__name__ == "DecoderBlock"


def stage_seconds(
    stage: Stage, shapes: Shapes, resolved: Resolved, cluster: Cluster, replicas: int, e: Efficiency
) -> tuple[Seconds, float, float]:
    """Return (seconds, model FLOPs, FLOPs with recomputation) of a rank's passes of one micro-batch through `stage`."""
    p = shapes.config.parallel
    matmul_rate = cluster.sustained_peak(resolved.precision) * e.matmul * _narrow_efficiency(shapes, e)
    memory_rate = cluster.memory_bandwidth * 1e9 * e.memory
    recomputes = bool(shapes.config.recomputed_layers)
    model_flops = 0.0
    done_flops = 0.0
    seconds = Seconds()
    for layer in stage.layers:
        matmul_flops, score_flops = layer_flops(shapes, layer)
        forward_flops = matmul_flops + score_flops
        # A backward pass has the work of two forward passes, and recomputation repeats the forward pass. The model's
        # FLOPs do not count repeated work.
        repeats = 4 if recomputes and layer.repeated else 3
        model_flops += 3 * forward_flops
        done_flops += repeats * forward_flops
        seconds.matmuls += repeats * matmul_flops / matmul_rate
        if layer.repeated:  # a transformer layer, which also has attention, memory traffic and collectives
            qkv_flops = _recomputed_flops(shapes, layer)
            done_flops += qkv_flops
            seconds.matmuls += qkv_flops / matmul_rate
            _add_layer_seconds(seconds, layer, score_flops, shapes, resolved, cluster, e)
        elif layer.name == "head":
            # The matmul is counted above. Loss and softmax are taken to access the logits and their gradients six times
            # in all, to read or write them, and each rank has its shard of the vocabulary.
            accesses = 6 * shapes.layer_tokens(layer) * vocabulary_rows(shapes.config)
            seconds.memory += accesses * shapes.width / memory_rate
    if resolved.zero_stage == 3:
        # The weights are gathered for the forward and for the backward pass. Each gather is half of an all-reduce.
        weight_bytes = stage.count.held * shapes.width
        seconds.weights = all_reduce_seconds(weight_bytes, replicas, shapes.ranks, cluster, e)
    if p.stages > 1:
        # Ranks of neighbouring stages lie as many ranks apart as a stage has.
        link = cluster.slowest_link(p.stages, shapes.ranks * replicas)
        bandwidth = link.gigabytes_per_second * 1e9 * e.link
        message_time = boundary_bytes(stage, shapes) / bandwidth + link.latency_seconds
        # Each chunk of layers sends hidden states forward and receives their gradients.
        seconds.boundary = 2 * message_time * p.virtual_pipeline_size
    return seconds, model_flops, done_flops


def _recomputed_flops(shapes: Shapes, layer: Layer) -> float:
    """Return the FLOPs of the matmuls that --recompute-modules repeats in a transformer layer's backward pass."""
    m = shapes.config.model
    if "qkv" not in m.recompute_modules:
        return 0.0
    # The rows of the query, key and value projection; a matmul takes 2 FLOPs for each weight and token.
    heads = m.num_attention_heads + 2 * m.key_value_heads
    return 2.0 * shapes.layer_tokens(layer) * m.hidden_size * heads * m.head_size / shapes.ranks


def _add_layer_seconds(
    times: Seconds, layer: Layer, attn_flops: float, shapes: Shapes, resolved: Resolved, cluster: Cluster, e: Efficiency
) -> None:
    """Add the seconds of a transformer layer, apart from its matmuls. attn_flops: FLOPs of its attention scores."""
    m = shapes.config.model
    p = shapes.config.parallel
    tokens = shapes.layer_tokens(layer)
    peak = cluster.sustained_peak(resolved.precision)
    memory_rate = cluster.memory_bandwidth * 1e9 * e.memory
    # Passes through the layer: forward, and twice as much backward, and forward again if the layer is recomputed. A
    # forward pass has two all-reduces, after attention and MLP, and two all-to-alls, before and after the experts. A
    # backward pass has as many.
    passes = 3
    attention_passes = 4 if m.checkpoint_attention else 3
    all_reduces = 4
    all_to_alls = 4
    if shapes.config.recomputed_layers:
        passes = 4
        attention_passes = 4
        all_reduces = 6
        all_to_alls = 6
    # A cross-attention adds one all-reduce to the forward pass and one to the backward pass.
    if _has_cross_attention(layer):
        all_reduces += 2
    mlp_bytes = _mlp_activation_bytes(shapes, layer)
    # Each module of --recompute-modules is taken to read and write hidden states and a third of the MLP's activations.
    times.memory += len(m.recompute_modules) * 2 * (shapes.hidden(tokens) + mlp_bytes / 3) / memory_rate
    times.memory += passes * _memory_traffic(shapes, layer, e) / memory_rate
    # Attention without a fused kernel (score_passes > 0) consists of matmuls, which are small.
    attention_efficiency = e.matmul / 2 if e.score_passes else e.attention
    times.attention += attention_passes * attn_flops / (peak * attention_efficiency)
    times.expert_parallel += all_to_alls * _all_to_all_seconds(shapes, layer, cluster, e)
    states = tokens * m.hidden_size * shapes.width
    times.tensor_parallel += all_reduces * all_reduce_seconds(states, shapes.ranks, 1, cluster, e)
    # kv_bytes are those of the keys and values of the whole sequence, which all context-parallel ranks share.
    context = p.context_parallel_size
    kv_bytes = 2 * tokens * m.key_value_heads * m.head_size / shapes.ranks * shapes.width * context
    # Both passes gather keys and values and one scatters their gradients, each half of an all-reduce.
    times.context_parallel += 1.5 * all_reduce_seconds(kv_bytes, context, shapes.ranks, cluster, e)


def boundary_bytes(stage: Stage, shapes: Shapes) -> float:
    """Return the bytes that a rank sends to the next stage per micro-batch.

    A rank sends its shard of the hidden states. In a T5 decoder, it also sends its shard of the encoder's output.
    """
    last_layer = stage.layers[-1]
    sent_tokens = shapes.layer_tokens(last_layer)
    if shapes.in_decoder(last_layer):
        sent_tokens += shapes.tokens[0]  # the encoder's tokens
    return sent_tokens * shapes.config.model.hidden_size * shapes.width / shapes.ranks


def cost_of(
    config: Config, resolved: Resolved, world: int, cluster: Cluster, stages: Sequence[Stage], e: Efficiency = DEFAULT
) -> Cost:
    """Return the cost of one step. Raises ValueError if the cluster's file gives no peak for the run's dtype."""
    p = config.parallel
    gas = config.train.gas
    shapes = Shapes(config, resolved.precision, cluster.accelerated, resolved.zero_stage)
    replicas = p.data_parallel_size(world) * p.context_parallel_size
    chunks = p.virtual_pipeline_size
    units = pipeline_units(p.pipeline_schedule, p.pipeline_extra_warmup, chunks, p.stages, gas, e.backward)
    # DeepSpeed's ZeRO 2 and 3 reduce gradients in the training dtype; without them they are fp32.
    gradient_width = 4 if resolved.zero_stage <= 1 else shapes.width
    seconds = []
    model_flops = done_flops = reduction_seconds = updated_parameters = max_boundary = all_to_all_bytes = 0.0
    for stage in stages:
        stage_time, stage_flops, stage_done_flops = stage_seconds(stage, shapes, resolved, cluster, replicas, e)
        seconds.append(stage_time)
        model_flops += stage_flops
        done_flops += stage_done_flops
        parts = stage.count.by_replicas(replicas, p.expert_parallel_size)
        stage_reduction, stage_updated = _gradient_costs(parts, shapes, gradient_width, resolved, cluster, e)
        reduction_seconds = max(reduction_seconds, stage_reduction)
        updated_parameters = max(updated_parameters, stage_updated)
        max_boundary = max(max_boundary, boundary_bytes(stage, shapes))
        # Each layer has two all-to-alls in the forward pass and two in the backward pass.
        all_to_all_bytes = max(all_to_all_bytes, 4 * sum(expert_bytes(shapes, layer) for layer in stage.layers))
    slowest = max(each.total for each in seconds)
    average = sum(each.total for each in seconds) / len(seconds)
    held = max(stage.count.held for stage in stages)
    # A reduction can hide only behind the last backward pass, two thirds of a micro-batch's time.
    overlapped = min(reduction_seconds * e.overlap, slowest * 2 / 3) if p.overlap_grad_reduce else 0.0
    # ZeRO 2 and 3 scatter gradients in each micro-batch, half of an all-reduce; ZeRO 2 gathers weights at the end.
    gather_seconds = reduction_seconds / 2 if resolved.zero_stage == 2 else 0.0
    if resolved.zero_stage >= 2:
        reduction_seconds *= gas / 2
        overlapped *= gas / 2
    # Adam reads a gradient, and reads and writes two moments and the fp32 weight: 28 bytes.
    update_seconds = (updated_parameters * 28 + held * 2 * shapes.width) / (cluster.memory_bandwidth * 1e9 * e.memory)
    ranks = shapes.ranks * replicas
    # The slowest stage works through all micro-batches; filling and draining visits all stages, so it takes their mean.
    pass_seconds = gas * slowest + (units - gas) * average
    return Cost(
        passes=pass_seconds,
        step=pass_seconds + reduction_seconds - overlapped + gather_seconds + update_seconds + e.step_seconds,
        bubble=1 - gas / units,
        stages=seconds,
        gradients=reduction_seconds - overlapped + gather_seconds,
        optimizer=update_seconds,
        model_flops=model_flops * (gas * ranks),
        done_flops=done_flops * (gas * ranks),
        tokens=config.train_batch_size(world) * sum(sample_lengths(config)),
        devices=world,
        peak=cluster.peak(resolved.precision),
        boundary_bytes=max_boundary if p.stages > 1 else 0.0,
        gradient_bytes=held * float(gradient_width),
        collective_bytes=_all_reduce_bytes(stages, shapes),
        expert_bytes=all_to_all_bytes,
    )


def _all_reduce_bytes(stages: Sequence[Stage], shapes: Shapes) -> float:
    """Return the bytes of a rank's model-parallel all-reduces per micro-batch: four for each transformer layer."""
    if shapes.ranks == 1:
        return 0.0
    layers = max(stage.repeated for stage in stages)
    return 4.0 * max(shapes.tokens) * shapes.config.model.hidden_size * shapes.width * layers


def _gradient_costs(
    parts: Iterable[tuple[Count, int]], shapes: Shapes, width: int, resolved: Resolved, cluster: Cluster, e: Efficiency
) -> tuple[float, float]:
    """Return (seconds of the gradients' all-reduces, number of parameters that a rank's optimizer updates).

    parts: result of `Count.by_replicas`. width: bytes of an element of a gradient.
    """
    reduction_seconds = 0.0
    updated_parameters = 0.0
    for count, replicas in parts:
        reduction_seconds += all_reduce_seconds(count.held * width, replicas, shapes.ranks, cluster, e)
        # With ZeRO, each replica updates only its share.
        shards = replicas if resolved.zero_stage else 1
        updated_parameters += count.held / shards
    return reduction_seconds, updated_parameters
