"""Formulas for the bytes of activations that layers keep from the forward to the backward pass.

The formulas count the tensors that the autograd functions of `megatron` save for the backward pass. For comparison:
Korthikanti et al. 2022 give formulas for Megatron-LM's layers. Functions with a custom backward pass keep less. On a
CPU, dropout masks have the dtype of the activations. In the code, e is the number of bytes per element.
"""

from collections.abc import Sequence

from ..model.layers import Layer
from ..model.work import sample_lengths
from .sizes import Shapes, vocabulary_rows

# Numbers of logits that mpu/cross_entropy.py converts to fp32 at a time, on an accelerator and on a CPU.
CE_CHUNK, CE_CHUNK_CPU = 1 << 24, 1 << 20


def _attention(shapes: Shapes, queries: int, keys: int, query_length: int, key_length: int, has_bias: bool) -> float:
    """Return the bytes that attention keeps for the backward pass.

    Attention keeps queries, keys, values, output and the softmax statistics. On a CPU, attention with dropout has no
    fused kernel. It keeps tensors of the size of the attention scores instead of the statistics.
    queries, keys: number of query tokens and of key tokens in a micro-batch.
    query_length, key_length: number of query tokens and of key tokens in one sequence.
    has_bias: True if a relative-position bias, which all samples of the batch share, is added to the scores.
    """
    config = shapes.config
    m = config.model
    e = shapes.width
    query_size = m.num_attention_heads * m.head_size / shapes.ranks
    key_size = max(m.key_value_heads / shapes.ranks, 1) * m.head_size
    context = config.parallel.context_parallel_size
    # Cross-attention has a key head for each query head.
    if context == 1 and (queries != keys or query_length != key_length):
        key_size = query_size
    query_bytes = queries * query_size * e
    qkv_numbers = 0.0 if "qkv" in m.recompute_modules else queries * query_size + 2 * keys * key_size
    # Recomputed queries, keys and values may not be copied to fp32; --checkpoint-attention does not keep the copies.
    attention_width = shapes.matmul_width if qkv_numbers and not m.checkpoint_attention else e
    kept = qkv_numbers * attention_width
    if m.qk_norm:
        kept += qkv_numbers * e  # the projection, in which the norms' inputs lie
        kept += (queries * query_size + keys * key_size) / m.head_size * 4  # an fp32 statistic for each head and token
    kept += query_bytes  # the output has the size of the queries; the output projection keeps it as its input
    has_window = m.sliding_window is not None and m.sliding_window < key_length
    needs_all_keys = shapes.accelerated or m.attention_dropout or has_window
    # A CPU attends to the slices of a context-parallel rank one by one, without keeping all ranks' keys and values.
    in_slices = context > 1 and not needs_all_keys
    if _adjacent_heads(shapes) and not (in_slices or m.attention_dropout or m.checkpoint_attention):
        kept += query_bytes  # the output is copied from the order of heads to the order of tokens
    heads = m.num_attention_heads / shapes.ranks
    batch_size = config.train.batch_size
    num_scores = batch_size * heads * query_length * key_length
    if context > 1 and not m.checkpoint_attention:
        if not in_slices:
            kept += 2 * keys * context * key_size * e  # keys and values of all ranks
        num_scores *= _visible_share(context)
    bias_bytes = heads * query_length * key_length * attention_width if has_bias else 0.0
    if m.checkpoint_attention:  # scores and statistics are recomputed
        return kept + bias_bytes
    if m.attention_dropout and not shapes.accelerated:
        # Three tensors of scores (probabilities, dropout mask and the product of both), and the scaled queries.
        return kept + (3 * num_scores + queries * query_size) * attention_width
    if attention_width > e:
        kept += queries * query_size * attention_width  # the output before it is rounded
    return kept + bias_bytes + batch_size * heads * query_length * 4  # the softmax statistics are fp32


def _visible_share(context: int) -> float:
    """Return the share of scores that a context-parallel rank computes.

    A rank has two slices of the sequence, each of which sees only itself and what comes before it. With 2 ranks, rank 0
    has slices 0 and 3 of 4, which see 1 and 4 slices: it computes 5 of its 8 blocks of scores.
    """
    return (2 * context + 1) / (4 * context) if context > 1 else 1.0


def _adjacent_heads(shapes: Shapes) -> bool:
    """Return whether the tokens of a head lie side by side in memory: on a CPU in `GroupedSelfAttention`."""
    m = shapes.config.model
    grouped = m.key_value_heads < m.num_attention_heads or m.qk_norm or m.position_embedding == "rope"
    return grouped and not shapes.accelerated and "rope" not in m.reference_ops


def transformer_kept(shapes: Shapes, layer: Layer) -> float:
    """Return the bytes that a transformer layer without full recomputation keeps for the backward pass."""
    m = shapes.config.model
    e = shapes.width
    tokens = shapes.layer_tokens(layer)
    first_length, second_length = sample_lengths(shapes.config)  # (encoder, decoder) of a T5, else (whole sample, 0)
    length = tokens // shapes.config.train.batch_size  # tokens of one sample on this rank
    key_length = length
    hidden = shapes.hidden(tokens)
    # The statistics of a norm are fp32: the scale of each token, and LayerNorm's mean.
    is_rmsnorm = m.normalization == "rmsnorm"
    statistics = tokens / shapes.sequence_shards * (4 if is_rmsnorm else 8)
    sub_layers = _num_sub_layers(layer)
    kept = sub_layers * (hidden + statistics)  # input and statistics of the norm of each sub-layer
    if "norm" not in m.recompute_modules:
        kept += (sub_layers - layer.routes) * hidden  # outputs of norms; if the layer routes, `_mixture_kept` has one
    if "rms-norm" in m.reference_ops and is_rmsnorm:
        kept += sub_layers * hidden * (1 if e >= 4 else 3)  # what is scaled, and in 16 bits an fp32 copy of the input
    if m.hidden_dropout:
        kept += sub_layers * hidden / e * shapes.mask  # hidden / e is the number of elements of a dropout mask
    # A context-parallel rank has a part of the queries of each sequence, which see the keys of all ranks.
    if shapes.config.parallel.context_parallel_size > 1:
        key_length = first_length
    has_bias = m.position_embedding == "relative"
    kept += _attention(shapes, tokens, tokens, length, key_length, has_bias)
    if sub_layers == 3:  # cross-attention of the decoder to the encoder, without a bias
        kept += _attention(shapes, tokens, shapes.tokens[0], second_length, first_length, has_bias=False)
    if layer.routes:
        return kept + _mixture_kept(shapes, tokens)
    return kept + _inner_kept(shapes, tokens * m.ff_size)


def _num_sub_layers(layer: Layer) -> int:
    """Return 2 for attention and MLP, or 3 for a decoder layer, which has cross-attention, too."""
    return 3 if layer.cls.__name__ == "DecoderBlock" else 2


def _inner_kept(shapes: Shapes, numbers: float) -> float:
    """Return the bytes that an MLP keeps on one rank, before and after the activation function.

    numbers: number of inner activations over all model-parallel ranks.
    """
    m = shapes.config.model
    tensors = m.inner_projections  # before the activation function
    # The activation's output is the input of the output projection, so it is also kept unless it is recomputed. relu
    # keeps this output instead of its input, because its backward pass needs only the output.
    if "activation" not in m.recompute_modules and m.activation != "relu":
        tensors += 1
    return numbers / shapes.ranks * shapes.width * tensors


def _mixture_kept(shapes: Shapes, tokens: int) -> float:
    """Return the bytes that a mixture of experts keeps, with its input, if each rank gets equally many rows.

    The router keeps its input, scores, and numbers and weights of the experts. Each of a token's experts has a row of
    input, of inner activations and of output. The orders of rows are kept as int64.
    """
    m = shapes.config.model
    e = shapes.width
    router_width = max(e, 4)  # the router computes at least in fp32
    rows = tokens * m.experts_per_token
    hidden_bytes = shapes.hidden(tokens)
    router_input_bytes = hidden_bytes / e * router_width
    # In fp32 and fp64, the router's input is the output of the norm itself, so recomputing the norm recomputes it, too.
    is_recomputed = "norm" in m.recompute_modules and router_width == e
    kept = 0.0 if is_recomputed else router_input_bytes
    # The z-loss keeps a second table of scores [tokens, experts].
    score_tables = 1 + (m.router_z_loss > 0)
    kept += tokens / shapes.sequence_shards * (m.num_experts or 0) * router_width * score_tables
    if m.router_jitter:
        kept += router_input_bytes  # the input without jitter
    # For each row, the router keeps two int64 numbers and a weight; then come order and inverse, int64, and a weight.
    router_row_bytes = rows / shapes.sequence_shards * (16 + router_width)
    kept += router_row_bytes + rows * (16 + e)
    kept += 2 * rows * m.hidden_size * e + _inner_kept(shapes, rows * m.expert_ff_size)
    if shapes.config.parallel.expert_parallel_size > 1:
        kept += 16 * rows  # order and inverse of the rows that arrive from other ranks
    if m.num_shared_experts:
        if shapes.sequence_shards > 1 or router_width > e:  # else their input is the router's
            kept += tokens * m.hidden_size * e
        kept += _inner_kept(shapes, tokens * m.num_shared_experts * m.expert_ff_size)
        if m.shared_expert_gate:  # it multiplies the output of the shared experts
            kept += tokens * m.hidden_size * e
    return kept


def _inner_gradients(shapes: Shapes) -> int:
    """Return how many tensors of the MLP's inner size its activation's backward pass adds to those that were kept.

    The gradient of the output is the first. The gradient of the input is the second only for relu: other activations
    have freed their output by then, but the backward pass of relu reads it.
    A compiled gated activation writes its two gradients at once. On a CPU it makes four temporary tensors, too.
    """
    m = shapes.config.model
    if m.is_gated:
        return 2 if shapes.accelerated else 2 + 4
    return 2 if m.activation == "relu" else 1


def backward_working(shapes: Shapes, layer: Layer) -> float:
    """Return the bytes of activation gradients during a transformer layer's backward pass.

    A grouped matmul of experts, in bf16 on CUDA, also needs a copy of all experts' weights and their gradient.
    """
    m = shapes.config.model
    width = shapes.width
    tokens = shapes.layer_tokens(layer)
    hidden = 2 * shapes.hidden(tokens)  # gradients of the residual connection and of the branch beside it
    # The backward pass of a norm in 16 bits has its input, its gradient and the result in fp32.
    norm_bytes = 3 * tokens * m.hidden_size * 4 / shapes.sequence_shards if width < 4 else 0.0
    other_bytes = max(norm_bytes, _scores_working(shapes, layer))
    if not layer.routes:
        mlp_bytes = tokens * m.ff_size * _inner_gradients(shapes) / shapes.ranks * width
        return hidden + max(mlp_bytes, other_bytes)
    rows = tokens * m.experts_per_token
    weight_copies = 0.0
    # With these settings, experts are computed one by one; else in bf16 on accelerators by one grouped matmul.
    is_looped = m.hidden_bias or "activation" in m.recompute_modules or shapes.zero_stage == 3
    if shapes.accelerated and shapes.precision == "bf16" and not is_looped:
        experts_on_rank = (m.num_experts or 0) / shapes.config.parallel.expert_parallel_size / shapes.ranks
        weight_copies = 2 * experts_on_rank * m.hidden_size * m.expert_ff_size * m.inner_projections * width
    row_bytes = 3 * rows * m.hidden_size * width  # three tensors with a row for each expert of each token
    shared_numbers = tokens * m.num_shared_experts * m.expert_ff_size
    shared_bytes = shared_numbers * _inner_gradients(shapes) / shapes.ranks * width
    return hidden + max(row_bytes, shared_bytes, other_bytes) + weight_copies


def _scores_working(shapes: Shapes, layer: Layer) -> float:
    """Return the bytes of temporary scores in the backward pass of attention on a CPU.

    With dropout they are a gradient, and with --checkpoint-attention the three tensors that attention with dropout
    keeps. With a relative bias and no dropout, they are six tensors of the scores of one sample, at least in fp32.
    """
    m = shapes.config.model
    if shapes.accelerated:
        return 0.0
    batch_size = shapes.config.train.batch_size
    length = shapes.layer_tokens(layer) // batch_size  # tokens of one sample on this rank
    scores = m.num_attention_heads / shapes.ranks * length**2  # number in a sample, for the keys of this rank
    if m.attention_dropout:
        # There are keys of all `context` ranks, so `context` times as many scores, of which a share is computed.
        context = shapes.config.parallel.context_parallel_size
        tensors = 4 if m.checkpoint_attention else 1
        return tensors * batch_size * scores * context * _visible_share(context) * shapes.matmul_width
    return 6 * scores * max(shapes.width, 4) if m.position_embedding == "relative" else 0.0


def deferred_grad_bytes(shapes: Shapes, layers: Sequence[Layer]) -> float:
    """Return the bytes of the output gradients that a split backward pass keeps for the gradients of the weights.

    They are those of the matmuls and norms of a micro-batch's transformer layers, and of the logits.
    """
    m = shapes.config.model
    # Only the last pipeline stage ends with the head, which computes logits; they become their own gradient.
    total = logits_bytes(shapes)[0] if layers[-1].name == "head" else 0.0
    qkv_size = (m.num_attention_heads + 2 * m.key_value_heads) * m.head_size / shapes.ranks
    for layer in layers:
        if not layer.repeated:
            continue
        tokens = shapes.layer_tokens(layer)
        sub_layers = _num_sub_layers(layer)
        attentions = sub_layers - 1  # all sub-layers except the MLP
        inner_size = m.experts_per_token * m.expert_ff_size if layer.routes else m.ff_size
        inner_size *= m.inner_projections
        # Each sub-layer has a norm and an output projection, whose gradients have the size of the hidden states; only
        # sequence parallelism shards these, see `hidden`. Heads and inner activations are split over all model-parallel
        # ranks.
        total += 2 * sub_layers * shapes.hidden(tokens)
        total += (attentions * tokens * qkv_size + tokens * inner_size / shapes.ranks) * shapes.width
    return total


def other_layer_kept(shapes: Shapes, layer: Layer) -> float:
    """Return the bytes that a layer other than a transformer layer keeps for the backward pass.

    Such layers keep input and output of a norm, dropout masks or token ids.
    """
    m = shapes.config.model
    tokens = shapes.layer_tokens(layer)
    hidden_bytes = shapes.hidden(tokens)
    name = layer.cls.__name__
    if name in ("StackNorm", "DecoderNorm"):
        # The norm keeps its input, and the layer after it keeps the output. Only logits in chunks do not, as they have
        # their gradients before the backward pass; the output of the encoder's norm goes to the decoder instead.
        tensors = 1 if chunked_loss_kept(shapes) and layer.name != "encoder.final_norm" else 2
        return tensors * hidden_bytes + tokens * 8 / shapes.sequence_shards  # a token's mean and scale, in fp32
    if name in ("DecoderStart", "StackStart"):
        # The dropout mask has an element of `shapes.mask` bytes for each element of the hidden states.
        mask_bytes = hidden_bytes / shapes.width * shapes.mask if m.hidden_dropout else 0.0
        return mask_bytes + 8 * tokens  # token ids are int64
    if name == "WordEmbedding" and layer.name != "head":
        return 8.0 * tokens  # int64 token ids
    return 0.0


def kept_bytes(shapes: Shapes, layers: Sequence[Layer]) -> float:
    """Return the bytes that `layers` keep for the backward pass of one micro-batch, without logits.

    With full recomputation, only the input of each group of --checkpoint-num-layers transformer layers is kept.
    """
    total = 0.0
    for layer in layers:
        if not layer.repeated:
            total += other_layer_kept(shapes, layer)
        elif not shapes.config.recomputed_layers:
            total += transformer_kept(shapes, layer)
    for group in _recomputed_groups(shapes, layers):
        total += shapes.hidden(shapes.layer_tokens(group[0]))
    return total


def _recomputed_groups(shapes: Shapes, layers: Sequence[Layer]) -> list[list[Layer]]:
    """Return the groups of transformer layers that are recomputed together; those of two stacks are never together."""
    max_layers = shapes.config.recomputed_layers
    groups: list[list[Layer]] = []
    is_open = False
    if not max_layers:
        return groups
    for layer in layers:
        if not layer.repeated:
            is_open = is_open and layer.prelude  # a prelude lies within a group; any other layer ends the group
        elif is_open and len(groups[-1]) < max_layers:
            groups[-1].append(layer)
        else:
            groups.append([layer])
            is_open = True
    return groups


def shared_table_bytes(shapes: Shapes, layers: Sequence[Layer]) -> float:
    """Return the bytes of the mask of --sliding-window and of the rotation angles, which micro-batches share.

    Layers share them, too, except under ZeRO 3, whose hooks give each layer tensors of its own.
    """
    config = shapes.config
    m = config.model
    # The number of transformer layers (`repeated` is True for them) or one copy for all.
    copies = sum(layer.repeated for layer in layers) if shapes.zero_stage == 3 else 1
    length, _ = sample_lengths(config)
    total = 0.0
    has_whole_sample = config.parallel.context_parallel_size == 1
    if has_whole_sample and m.sliding_window is not None and m.sliding_window < length:
        total += length**2 * (1 + copies * shapes.width)  # a bool mask, and copies in the dtype of the activations
    if m.position_embedding == "rope":
        total += copies * 2 * length * m.rotary_size * 4  # cosines and sines in fp32
    return total


def recomputed_bytes(shapes: Shapes, layers: Sequence[Layer]) -> float:
    """Return the peak bytes of recomputed activations: those of one group of --checkpoint-num-layers layers."""
    peak = 0.0
    for group in _recomputed_groups(shapes, layers):
        peak = max(peak, sum(transformer_kept(shapes, layer) for layer in group))
    return peak


def chunked_loss_kept(shapes: Shapes) -> float:
    """Return the bytes that the loss of one micro-batch keeps if its logits are computed in chunks, else 0.

    Its forward pass already computes the gradients of the output weight and of the hidden states.
    """
    m = shapes.config.model
    tokens = shapes.target_tokens
    chunk = m.logits_chunk_size
    # All logits are computed at once: without the flag, if one chunk holds all tokens, or by the reference formula.
    if not chunk or tokens <= chunk or "cross-entropy" in m.reference_ops:
        return 0.0
    rows = vocabulary_rows(shapes.config)
    # The weight's gradient is a sum over chunks, so it is at least fp32.
    return float(rows * m.hidden_size * max(shapes.width, 4) + tokens * m.hidden_size * shapes.width)


def logits_bytes(shapes: Shapes) -> tuple[float, float]:
    """Return (bytes of the logits, bytes of temporaries that exist at the same time as the logits).

    With --logits-chunk-size, only the logits of one chunk of a micro-batch exist at a time, else those of a whole
    micro-batch. The gradient of the logits overwrites the logits, so it takes no additional memory.
    """
    m = shapes.config.model
    e = shapes.width
    tokens = shapes.target_tokens
    rows = vocabulary_rows(shapes.config)  # of the output weight on this rank
    extra_bytes = chunked_loss_kept(shapes)
    if extra_bytes:
        if e < 4 and not shapes.accelerated:
            extra_bytes += rows * m.hidden_size * 4  # the gradient of a chunk in fp32, before it is added
        tokens = m.logits_chunk_size
    logits = float(tokens * rows * e)
    # The reference cross-entropy needs log-probabilities, their gradient and the gradient of the logits. 16-bit logits
    # are first copied to fp32. Tensor-parallel ranks each gather all logits.
    if "cross-entropy" in m.reference_ops:
        copies = 3 if e >= 4 else 7  # 7: in units of 16-bit logits, three tensors in fp32 and one in 16 bits
        gathered = shapes.ranks * logits if shapes.ranks > 1 else 0.0
        return logits, copies * shapes.ranks * logits + gathered
    # Other cross-entropy works in fp32 on a chunk of tokens and its gradient. If the logits have columns of padding,
    # it first copies the other columns to a contiguous tensor. The last of these copies is that of the chunk before.
    columns = min(rows, m.vocab_size or rows)  # without padding, if one rank has all
    token_bytes = columns * max(e, 4)
    chunk_tokens = max(1, (CE_CHUNK if shapes.accelerated else CE_CHUNK_CPU) // columns)
    chunk_bytes = min(tokens, chunk_tokens) * token_bytes
    previous_bytes = min(chunk_bytes, max(tokens - chunk_tokens, 0) * token_bytes)
    is_padded = rows * shapes.ranks != m.vocab_size
    loss_bytes = (2 if is_padded else 1) * chunk_bytes + previous_bytes
    # The gradient of the output weight is allocated after the fp32 copies of the logits have been freed.
    weight_grad = rows * m.hidden_size * e
    if not shapes.accelerated and e >= 4:
        weight_grad *= 2  # oneDNN first copies the weight to column-major order
    if shapes.matmul_width > e:  # the factors and the product in fp32, before the product is rounded
        weight_grad = shapes.matmul_width * (tokens * rows + (tokens + rows) * m.hidden_size)
    if shapes.sequence_shards > 1:
        weight_grad += 2 * tokens * m.hidden_size * e  # the gathered input, and its gradient before the reduce-scatter
    return logits, max(loss_bytes, weight_grad) + extra_bytes
