"""Formulas for the bytes of activations that layers keep from the forward to the backward pass.

The formulas count the tensors that the autograd functions of `megatron` save for the backward pass. For comparison:
Korthikanti et al. 2022 give formulas for Megatron-LM's layers. The layers of `megatron` keep less if a function has a
custom backward pass. They keep more on a CPU, where a dropout mask has the dtype of the activations.
Names in the code: b is the micro-batch size, t the number of model-parallel ranks, e the number of bytes per element.
"""

from collections.abc import Sequence

from ..model.layers import Layer
from ..model.work import lengths
from .sizes import Shapes, padded_vocabulary

# Numbers of logits that mpu/cross_entropy.py converts to fp32 at a time, on an accelerator and on a CPU.
CE_CHUNK, CE_CHUNK_CPU = 1 << 24, 1 << 20


def _attention(x: Shapes, queries: int, keys: int, length: int, seen: int, causal_bias: bool, again: bool) -> float:
    """Return the bytes that attention keeps for the backward pass.

    Attention keeps queries, keys, values, output and the softmax statistics. On a CPU, attention with dropout has no
    fused kernel. It keeps tensors of the size of the attention scores instead of the statistics.
    queries, keys: number of query tokens and of key tokens in a micro-batch.
    length, seen: number of query tokens and of key tokens in one sequence.
    causal_bias: True if a relative-position bias is added to the scores.
    again: True if queries, keys and values are recomputed in the backward pass.
    """
    m = x.config.model
    t = x.ranks
    e = x.width
    inner = m.num_attention_heads * m.head_size / t
    groups = max(m.key_value_heads / t, 1) * m.head_size
    context = x.config.parallel.context_parallel_size
    if context == 1 and (queries != keys or length != seen):
        groups = inner
    kept = 0.0 if again else (queries * inner + 2 * keys * groups) * e
    if m.qk_norm:
        # the projection, in which the norms' inputs lie, and their statistics
        kept += 0.0 if again else (queries * inner + 2 * keys * groups) * e
        kept += (queries * inner + keys * groups) / m.head_size * 4
    kept += queries * inner * e  # output of attention, which is the input of the output projection
    has_window = m.sliding_window is not None and m.sliding_window < seen
    in_pieces = context > 1 and not (x.accelerated or x.config.is_t5 or m.attention_dropout or has_window)
    if _adjacent_heads(x) and not (in_pieces or m.attention_dropout or m.checkpoint_attention):
        kept += queries * inner * e  # the output is copied from the order of heads to the order of tokens
    heads = m.num_attention_heads / t
    b = x.config.train.batch_size
    scores = b * heads * length * seen
    if context > 1 and not (x.config.is_t5 or m.checkpoint_attention):
        if not in_pieces:
            kept += 2 * keys * context * groups * e  # keys and values of all ranks
        scores *= _visible_share(context)
    bias = heads * length * seen * e if causal_bias else 0.0  # all samples of the batch share it
    if m.checkpoint_attention:
        return kept + bias
    if m.attention_dropout and not x.accelerated:
        # It keeps the attention probabilities, the dropout mask, the product of both, and the scaled queries.
        return kept + 3 * scores * e + queries * inner * e
    return kept + bias + b * heads * length * 4


def _visible_share(context: int) -> float:
    """Return the share of scores that a context-parallel rank computes.

    A rank has two slices of the sequence, each of which sees only what comes before it.
    """
    return (2 * context + 1) / (4 * context) if context > 1 else 1.0


def _adjacent_heads(x: Shapes) -> bool:
    """Return whether the tokens of a head lie side by side in memory: on a CPU in `GroupedSelfAttention`."""
    m = x.config.model
    grouped = m.key_value_heads < m.num_attention_heads or m.qk_norm or m.position_embedding == "rope"
    return grouped and not x.accelerated and "rope" not in m.reference_ops


def transformer_kept(x: Shapes, layer: Layer) -> float:
    """Return the bytes that a transformer layer without full recomputation keeps for the backward pass."""
    m = x.config.model
    e = x.width
    tokens = x.of_layer(layer)
    first, second = lengths(x.config)
    length = tokens // x.config.train.batch_size
    norm_again = "norm" in m.recompute_modules
    qkv_again = "qkv" in m.recompute_modules
    state = x.hidden(tokens)
    statistics = tokens / x.shared * 4 * (1 if m.normalization == "rmsnorm" else 2)
    sub_layers = 3 if layer.cls.__name__ == "DecoderBlock" else 2
    kept = sub_layers * (state + statistics) + (sub_layers - layer.routes) * (0 if norm_again else state)
    if "rms-norm" in m.reference_ops and m.normalization == "rmsnorm":
        kept += sub_layers * state * (1 if e >= 4 else 3)  # what is scaled, and a copy of the input in fp32
    if m.hidden_dropout:
        kept += sub_layers * state / e * x.mask
    seen = first if x.config.parallel.context_parallel_size > 1 and not x.config.is_t5 else length
    kept += _attention(x, tokens, tokens, length, seen, m.position_embedding == "relative", qkv_again)
    if sub_layers == 3:
        encoded = x.tokens[0]
        kept += _attention(x, tokens, encoded, second, first, False, qkv_again)
    if layer.routes:
        return kept + _mixture_kept(x, tokens)
    return kept + _inner_kept(x, tokens * m.ff_size)


def _inner_kept(x: Shapes, numbers: float) -> float:
    """Return the bytes that an MLP keeps of `numbers` inner activations, before and after the activation function."""
    m = x.config.model
    copies = 2 if m.gated else 1
    # The backward pass of relu needs only its output.
    if "activation" not in m.recompute_modules and m.activation != "relu":
        copies += 1
    return numbers / x.ranks * x.width * copies


def _mixture_kept(x: Shapes, tokens: int) -> float:
    """Return the bytes that a mixture of experts keeps, with its input, if each rank gets equally many rows.

    The router keeps its input, scores, and numbers and weights of the experts. Each of a token's experts has a row of
    input, of inner activations and of output. The orders of rows are kept as int64.
    """
    m = x.config.model
    e = x.width
    k = x.config.model.experts_per_token
    wide = max(e, 4)
    rows = tokens * k
    h = m.hidden_size
    state = x.hidden(tokens)
    # fp32 and fp64 inputs are those of the router, shared experts and norm alike.
    kept = 0.0 if "norm" in m.recompute_modules and wide == e else state / e * wide
    tables = 1 + (m.router_z_loss > 0)
    kept += tokens / x.shared * (m.num_experts or 0) * wide * tables
    kept += state / e * wide if m.router_jitter else 0.0
    kept += rows / x.shared * (16 + wide) + rows * (16 + e)
    kept += 2 * rows * h * e + _inner_kept(x, rows * m.expert_ff_size)
    if x.config.parallel.expert_parallel_size > 1:
        kept += 16 * rows
    if m.num_shared_experts:
        kept += tokens * h * e if x.shared > 1 or wide > e else 0.0
        kept += _inner_kept(x, tokens * m.num_shared_experts * m.expert_ff_size)
        kept += tokens * h * e if m.shared_expert_gate else 0.0
    return kept


def _inner_gradients(x: Shapes) -> int:
    """Return how many tensors of the MLP's inner size its activation's backward pass adds to those that were kept.

    A compiled gated activation writes its two gradients at once. On a CPU it makes four temporary tensors, too.
    """
    m = x.config.model
    if m.gated:
        return 2 if x.accelerated else 6
    return 2 if m.activation == "relu" else 1


def inner_working(x: Shapes, layer: Layer) -> float:
    """Return the bytes of activation gradients during a transformer layer's backward pass.

    A grouped matmul of experts, in bf16 on CUDA, also needs a copy of all experts' weights and their gradient.
    """
    m = x.config.model
    tokens = x.of_layer(layer)
    parts = 2 if m.gated else 1
    hidden = 2 * x.hidden(tokens)
    # The backward pass of a norm in 16 bits has its input, its gradient and the result in fp32.
    of_norm = 3 * tokens * m.hidden_size * 4 / x.shared if x.width < 4 else 0.0
    of_others = max(of_norm, _bias_working(x, layer), _dropout_working(x, layer))
    if not layer.routes:
        of_mlp = tokens * m.ff_size * _inner_gradients(x) / x.ranks * x.width
        return hidden + max(of_mlp, of_others)
    rows = tokens * m.experts_per_token
    copies = 0.0
    looped = m.hidden_bias or "activation" in m.recompute_modules or x.config.parallel.zero_stage == 3
    if x.accelerated and x.precision == "bf16" and not looped:
        here = (m.num_experts or 0) / x.config.parallel.expert_parallel_size / x.ranks
        copies = 2 * here * m.hidden_size * m.expert_ff_size * parts * x.width
    of_rows = 3 * rows * m.hidden_size * x.width
    shared = tokens * m.num_shared_experts * m.expert_ff_size
    of_shared = shared * _inner_gradients(x) / x.ranks * x.width
    return hidden + max(of_rows, of_shared, of_others) + copies


def _dropout_working(x: Shapes, layer: Layer) -> float:
    """Return the bytes of temporary scores in the backward pass of attention with dropout on a CPU.

    They are a gradient, and with --checkpoint-attention the three tensors that attention with dropout keeps.
    """
    m = x.config.model
    if x.accelerated or not m.attention_dropout:
        return 0.0
    b = x.config.train.batch_size
    length = x.of_layer(layer) // b
    context = x.config.parallel.context_parallel_size
    seen = length * context * _visible_share(context)
    tensors = 4 if m.checkpoint_attention else 1
    return tensors * b * m.num_attention_heads / x.ranks * length * seen * x.width


def _bias_working(x: Shapes, layer: Layer) -> float:
    """Return the bytes of temporary scores while a CPU computes the gradients of attention with a relative bias.

    They are six tensors of the scores of one sample, at least in fp32; with dropout, one of the scores of all samples.
    """
    m = x.config.model
    if m.position_embedding != "relative" or x.accelerated:
        return 0.0
    b = x.config.train.batch_size
    length = x.of_layer(layer) // b
    scores = m.num_attention_heads / x.ranks * length**2
    if m.attention_dropout:
        return b * scores * x.width
    return 6 * scores * max(x.width, 4)


def deferred_kept(x: Shapes, layers: Sequence[Layer]) -> float:
    """Return the bytes of the output gradients that a split backward pass keeps for the gradients of the weights.

    They are those of the matmuls and norms of a micro-batch's transformer layers, and of the logits.
    """
    m = x.config.model
    total = logits_bytes(x)[0] if layers[-1].name == "head" else 0.0
    for layer in layers:
        if layer.repeated:
            tokens = x.of_layer(layer)
            sub_layers = 3 if layer.cls.__name__ == "DecoderBlock" else 2
            attentions = sub_layers - 1
            heads = (m.num_attention_heads + 2 * m.key_value_heads) * m.head_size / x.ranks
            rows = tokens * (m.experts_per_token if layer.routes else 1)
            inner = rows * (m.expert_ff_size if layer.routes else m.ff_size) * (2 if m.gated else 1) / x.ranks
            total += 2 * sub_layers * x.hidden(tokens) + (attentions * tokens * heads + inner) * x.width
    return total


def other_kept(x: Shapes, layer: Layer) -> float:
    """Return the bytes that a layer other than a transformer layer keeps for the backward pass.

    Such layers keep input and output of a norm, dropout masks or token ids.
    """
    m = x.config.model
    tokens = x.of_layer(layer)
    name = layer.cls.__name__
    state = x.hidden(tokens)
    if name in ("StackNorm", "DecoderNorm"):
        # Logits in chunks have their gradients before the backward pass, so nothing keeps the output.
        tensors = 1 if kept_of_chunks(x) and layer.name != "encoder.final_norm" else 2
        return tensors * state + tokens * 8 / x.shared
    if name in ("DecoderStart", "StackStart"):
        return (state / x.width * x.mask if m.hidden_dropout else 0.0) + 8 * tokens
    if name == "WordEmbedding" and layer.name != "head":
        return 8.0 * tokens
    return 0.0


def kept_by(x: Shapes, layers: list[Layer] | tuple[Layer, ...]) -> float:
    """Return the bytes that `layers` keep for the backward pass of one micro-batch, without logits.

    With full recomputation, only the input of each group of --checkpoint-num-layers transformer layers is kept.
    """
    total = 0.0
    for layer in layers:
        if not layer.repeated:
            total += other_kept(x, layer)
        elif not x.config.recomputed_layers:
            total += transformer_kept(x, layer)
    for group in _recomputed_groups(x, layers):
        total += x.hidden(x.of_layer(group[0]))
    return total


def _recomputed_groups(x: Shapes, layers: Sequence[Layer]) -> list[list[Layer]]:
    """Return the groups of transformer layers that are recomputed together; those of two stacks are never together."""
    most = x.config.recomputed_layers
    groups: list[list[Layer]] = []
    is_open = False
    if not most:
        return groups
    for layer in layers:
        if not layer.repeated:
            is_open = is_open and layer.prelude
        elif is_open and len(groups[-1]) < most:
            groups[-1].append(layer)
        else:
            groups.append([layer])
            is_open = True
    return groups


def tables_of(x: Shapes, layers: Sequence[Layer]) -> float:
    """Return the bytes of the mask of --sliding-window and of the rotation angles, which micro-batches share.

    Layers share them, too, except under ZeRO 3, whose hooks give each layer tensors of its own.
    """
    m = x.config.model
    repeated = [layer for layer in layers if layer.repeated]
    copies = len(repeated) if x.config.parallel.zero_stage == 3 else 1
    length, _ = lengths(x.config)
    found = 0.0
    is_whole = x.config.parallel.context_parallel_size == 1
    if is_whole and m.sliding_window is not None and m.sliding_window < length:
        found += length**2 * (1 + copies * x.width)
    if m.position_embedding == "rope":
        found += copies * 2 * length * m.rotary_size * 4
    return found


def computed_again(x: Shapes, layers: list[Layer] | tuple[Layer, ...]) -> float:
    """Return the peak bytes of recomputed activations: those of one group of --checkpoint-num-layers layers."""
    most = 0.0
    for group in _recomputed_groups(x, layers):
        of_layers = [transformer_kept(x, layer) for layer in group]
        most = max(most, sum(of_layers))
    return most


def kept_of_chunks(x: Shapes) -> float:
    """Return the bytes that the loss of one micro-batch keeps if its logits are computed in chunks, else 0.

    Its forward pass already computes the gradients of the output weight and of the hidden states.
    """
    m = x.config.model
    tokens = x.tokens[1] if x.config.is_t5 else x.tokens[0]
    chunk = m.logits_chunk_size
    if not chunk or tokens <= chunk or "cross-entropy" in m.reference_ops:
        return 0.0
    rows = padded_vocabulary(x.config, x.ranks) // x.ranks
    return float(rows * m.hidden_size * max(x.width, 4) + tokens * m.hidden_size * x.width)


def logits_bytes(x: Shapes) -> tuple[float, float]:
    """Return (bytes of the logits, bytes of temporaries that exist at the same time as the logits).

    With --logits-chunk-size, only the logits of one chunk of a micro-batch exist at a time, else those of a whole
    micro-batch. The gradient of the logits overwrites the logits, so it takes no additional memory.
    """
    m = x.config.model
    e = x.width
    tokens = x.tokens[1] if x.config.is_t5 else x.tokens[0]
    rows = padded_vocabulary(x.config, x.ranks) // x.ranks
    chunk = m.logits_chunk_size
    extra = kept_of_chunks(x)
    if extra:
        if e < 4 and not x.accelerated:
            extra += rows * m.hidden_size * 4  # the gradient of a chunk in fp32, before it is added
        tokens = chunk or tokens
    logits = float(tokens * rows * e)
    columns = min(rows, m.vocab_size or rows)  # without padding, if one rank has all
    step = max(1, (CE_CHUNK if x.accelerated else CE_CHUNK_CPU) // columns)
    part = min(tokens, step) * columns * max(e, 4)
    padded = rows * x.ranks != m.vocab_size
    copies = 3 if padded else 2
    # The reference cross-entropy needs log-probabilities, their gradient and the gradient of the logits. 16-bit logits
    # are first copied to fp32. Tensor-parallel ranks each gather all logits.
    if "cross-entropy" in m.reference_ops:
        copies = 3 if e >= 4 else 7
        gathered = x.ranks * logits if x.ranks > 1 else 0.0
        return logits, copies * x.ranks * logits + gathered
    # gradient of the output weight; it is allocated after the fp32 copies of the logits have been freed
    of_matrix = rows * m.hidden_size * e
    of_matrix *= 1 if x.accelerated or e < 4 else 2  # oneDNN first copies the output weight to column-major order
    if x.shared > 1:
        of_matrix += 2 * tokens * m.hidden_size * e  # the gathered input, and its gradient before the reduce-scatter
    # The last copy is that of the chunk before.
    before = min(part, max(tokens - step, 0) * columns * max(e, 4))
    return logits, max((copies - 1) * part + before, of_matrix) + extra
