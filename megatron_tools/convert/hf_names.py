"""Mapping between our tensors and Hugging Face's tensors, for import and export.

Our fused tensors interleave query, key and value by head (or group of heads), and the gate and up projections by
feature. Hugging Face's GPT-2 stores all queries, then all keys, then all values in one tensor, and its matrices are
transposed. Hugging Face's other models have separate tensors for query, key, value, gate and up projection.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config import ModelConfig

Parts = Sequence[Tensor]


@dataclass(frozen=True)
class Match:
    """The name of one of our parameters, and the names of the Hugging Face tensors that contain its values."""

    our_name: str
    their_names: tuple[str, ...]
    split: Callable[[Tensor], Parts] = lambda tensor: [tensor]  # converts our tensor to Hugging Face's
    join: Callable[[Parts], Tensor] = lambda tensors: tensors[0]  # the reverse of `split`


Matches = Iterator[Match]


def _transposed(match: Match) -> Match:
    """Return `match` with Hugging Face's matrix transposed."""

    def split(t: Tensor) -> Parts:
        return [part.T for part in match.split(t)]

    def join(ts: Parts) -> Tensor:
        return match.join([t.T for t in ts])

    return Match(match.our_name, match.their_names, split, join)


def swap_order(rows: Tensor, outer: int, inner: int) -> Tensor:
    """Return the rows of a fused tensor, which are `outer` groups of `inner` parts, as `inner` groups of `outer` parts.

    For example, with outer 2 and inner 3, the rows q0 k0 v0 q1 k1 v1 become q0 q1 k0 k1 v0 v1.
    """
    by_outer = rows.reshape(outer, inner, -1, *rows.shape[1:])
    return by_outer.transpose(0, 1).reshape(rows.shape)


def _interleaved(ours: str, theirs: tuple[str, ...], groups: int, first_size: int = 1) -> Match:
    """Match separate Hugging Face tensors with our tensor, which interleaves their rows group by group.

    groups: number of groups. A group is a head (for query, key and value), a feature (for gate and up projection) or,
    in grouped-query attention, all query heads that share a key head, then this key head, then its value head.
    first_size: number of parts, such as heads, that the first of their tensors has in a group; the others have one.
    """
    # Parts that each of their tensors has in a group: 2, 1, 1 for a group q0 q1 k0 v0.
    sizes = [first_size, *[1] * (len(theirs) - 1)]

    # Two groups with a first size of 2: our heads q0 q1 k0 v0 q2 q3 k1 v1 are q0 q1 q2 q3, k0 k1 and v0 v1 in theirs.
    # With heads of 64 rows, the view of ours is [2, 4, 64, ...]. It is split into [2, 2, 64, ...], [2, 1, 64, ...] and
    # [2, 1, 64, ...], which are flattened to the 256, 128 and 128 rows of theirs.
    def split(t: Tensor) -> Parts:
        by_group = t.view(groups, sum(sizes), -1, *t.shape[1:])
        return [part.flatten(0, 2) for part in torch.split(by_group, sizes, 1)]

    def join(ts: Parts) -> Tensor:  # the inverse of `split`
        by_group = []
        for t, size in zip(ts, sizes, strict=True):
            by_group.append(t.view(groups, size, -1, *t.shape[1:]))
        return torch.cat(by_group, 1).flatten(0, 2)

    return Match(ours, theirs, split, join)


def parameter_matches(m: ModelConfig) -> Matches:
    """Yield one Match for each parameter of a model, whatever its family.

    Hugging Face's models have no factors of muP and fixed factors of attention scores, so the weights that a match
    converts are multiplied by the factors of our model.
    """
    by_family = {"gpt2": gpt2_matches, "llama": llama_matches, "t5": t5_matches}
    matches_of_family = by_family[m.family or "gpt2"]
    for match in matches_of_family(m):
        factor = _weight_factor(m, match.our_name)
        yield _with_factor(match, factor, m)
    if not m.tie_embeddings:
        yield Match("head.word_embeddings.weight", ("lm_head.weight",))


def _weight_factor(m: ModelConfig, name: str) -> float:
    """Return the factor by which our model multiplies what it computes from the weight `name`, and theirs does not.

    The factor of the logits is that of the norm before them, because the embedding may be tied to the output matrix.
    """
    # The module of layers.0.attention.dense.weight is `dense`.
    module = name.rsplit(".", 2)[-2]
    if name.startswith(("final_norm.", "decoder.final_norm.")):
        # Hugging Face's T5 multiplies tied logits by 1 / sqrt(hidden_size).
        hf_factor = m.hidden_size**-0.5 if m.scale_tied_logits else 1.0
        return m.logits_scale / hf_factor
    if module in ("dense", "dense_4h_to_h"):
        return m.decoder_branch_factor if name.startswith("decoder.") else m.branch_factor
    # Scores are proportional to the queries. A norm of the queries would undo a factor on their projection, so its
    # weight takes the factor.
    query_modules = ("query_norm",) if m.qk_norm else ("query_key_value", "query")
    if module not in query_modules:
        return 1.0
    hf_divides = m.scale_attention and m.family != "t5"  # Hugging Face's T5 never divides scores by sqrt(head size)
    hf_factor = m.head_size**-0.5 if hf_divides else 1.0
    return m.attention_scale / hf_factor


def _with_factor(match: Match, factor: float, m: ModelConfig) -> Match:
    """Return `match` with our weight multiplied by `factor`: only its queries, if it also holds keys and values."""
    # A factor of 1 may come out as 1.0000000000000002, because it is a quotient.
    if abs(factor - 1.0) < 1e-12:
        return match
    scale = _scale_queries if ".query_key_value." in match.our_name else _scale_all

    def split(t: Tensor) -> Parts:
        return match.split(scale(t, factor, m))

    def join(ts: Parts) -> Tensor:
        return scale(match.join(ts), 1 / factor, m)

    return Match(match.our_name, match.their_names, split, join)


def _scale_all(t: Tensor, factor: float, _: ModelConfig) -> Tensor:
    return t * factor


def _scale_queries(t: Tensor, factor: float, m: ModelConfig) -> Tensor:
    """Return our fused tensor of queries, keys and values with only the rows of its queries multiplied."""
    # Four query heads in two groups: the heads of a group are q0 q1 k0 v0, of which the last two stay as they are.
    heads = t.reshape(m.key_value_heads, -1, m.head_size, *t.shape[1:])
    queries = heads[:, :-2] * factor
    return torch.cat([queries, heads[:, -2:]], 1).reshape(t.shape)


def gpt2_matches(m: ModelConfig) -> Matches:
    """Yield one Match for each parameter of a GPT-2 besides the output matrix."""
    yield Match("embedding.word_embeddings.weight", ("transformer.wte.weight",))
    yield Match("position_embedding.weight", ("transformer.wpe.weight",))
    heads = m.num_attention_heads
    names = {"attention.dense": "attn.c_proj", "mlp.dense_h_to_4h": "mlp.c_fc", "mlp.dense_4h_to_h": "mlp.c_proj"}
    for layer in range(m.num_layers):
        our_layer = f"layers.{layer}"
        hf_layer = f"transformer.h.{layer}"
        for kind in ("weight", "bias"):
            yield Match(f"{our_layer}.input_layernorm.{kind}", (f"{hf_layer}.ln_1.{kind}",))
            yield Match(f"{our_layer}.post_attention_layernorm.{kind}", (f"{hf_layer}.ln_2.{kind}",))
            # Our fused tensor has the rows q, k and v of each head in turn, theirs all q, then all k, all v. Two heads:
            # our rows q0 k0 v0 q1 k1 v1 are q0 q1 k0 k1 v0 v1 in Hugging Face's tensor.
            qkv = Match(
                f"{our_layer}.attention.query_key_value.{kind}",
                (f"{hf_layer}.attn.c_attn.{kind}",),
                lambda tensor: [swap_order(tensor, heads, 3)],
                lambda tensors: swap_order(tensors[0], 3, heads),
            )
            linear_layers = [qkv]
            for ours, theirs in names.items():
                linear_layers.append(Match(f"{our_layer}.{ours}.{kind}", (f"{hf_layer}.{theirs}.{kind}",)))
            # GPT-2's matrices are transposed. Its biases are vectors and stay as they are.
            for match in linear_layers:
                yield _transposed(match) if kind == "weight" else match
    for kind in ("weight", "bias"):
        yield Match(f"final_norm.norm.{kind}", (f"transformer.ln_f.{kind}",))


def llama_matches(m: ModelConfig) -> Matches:
    """Yield one Match for each parameter of a Llama, Qwen, Mistral or Mixtral besides the output matrix."""
    yield Match("embedding.word_embeddings.weight", ("model.embed_tokens.weight",))
    qkv_kinds = ("weight", "bias") if m.has_qkv_bias else ("weight",)
    other_kinds = ("weight", "bias") if m.hidden_bias else ("weight",)
    for layer in range(m.num_layers):
        our_layer = f"layers.{layer}"
        hf_layer = f"model.layers.{layer}"
        hf_attention = f"{hf_layer}.self_attn"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield Match(f"{our_layer}.{norm}.weight", (f"{hf_layer}.{norm}.weight",))
        for kind in qkv_kinds:
            hf_names = (
                f"{hf_attention}.q_proj.{kind}",
                f"{hf_attention}.k_proj.{kind}",
                f"{hf_attention}.v_proj.{kind}",
            )
            query_heads = m.num_attention_heads // m.key_value_heads  # of a group
            yield _interleaved(
                f"{our_layer}.attention.query_key_value.{kind}", hf_names, m.key_value_heads, query_heads
            )
        if m.qk_norm:
            yield Match(f"{our_layer}.attention.query_norm.weight", (f"{hf_attention}.q_norm.weight",))
            yield Match(f"{our_layer}.attention.key_norm.weight", (f"{hf_attention}.k_norm.weight",))
        for kind in other_kinds:
            yield Match(f"{our_layer}.attention.dense.{kind}", (f"{hf_attention}.o_proj.{kind}",))
            if not m.has_experts(layer):
                yield from _gated_mlp_matches(f"{our_layer}.mlp", f"{hf_layer}.mlp", m.ff_size, kind)
        if m.has_experts(layer):
            yield from _mixture_matches(m, f"{our_layer}.mlp", hf_layer)
    yield Match("final_norm.norm.weight", ("model.norm.weight",))


def _gated_mlp_matches(
    our_mlp: str,
    hf_mlp: str,
    width: int,
    kind: str = "weight",
    names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
) -> Matches:
    """Yield the matches of a gated MLP. names: Hugging Face's names of gate, up and down projection."""
    gate, up, down = names
    hf_gate_and_up = (f"{hf_mlp}.{gate}.{kind}", f"{hf_mlp}.{up}.{kind}")
    yield _interleaved(f"{our_mlp}.dense_h_to_4h.{kind}", hf_gate_and_up, width)
    yield Match(f"{our_mlp}.dense_4h_to_h.{kind}", (f"{hf_mlp}.{down}.{kind}",))


def _mixture_matches(m: ModelConfig, our_mlp: str, hf_layer: str) -> Matches:
    """Yield the matches of a mixture of experts, with the names of Qwen or, for the settings of Mixtral, Mixtral's."""
    hf_moe = f"{hf_layer}.mlp"
    names = ("gate_proj", "up_proj", "down_proj")
    # Of the exported families, only Mixtral has neither norms of queries and keys nor shared experts.
    if not m.qk_norm and not m.num_shared_experts:
        hf_moe = f"{hf_layer}.block_sparse_moe"
        names = ("w1", "w3", "w2")
    yield Match(f"{our_mlp}.router.weight", (f"{hf_moe}.gate.weight",))
    for expert in range(m.num_experts or 0):
        yield from _gated_mlp_matches(
            f"{our_mlp}.experts.{expert}", f"{hf_moe}.experts.{expert}", m.expert_ff_size, names=names
        )
    if m.num_shared_experts:
        width = m.num_shared_experts * m.expert_ff_size
        yield from _gated_mlp_matches(f"{our_mlp}.shared_expert", f"{hf_moe}.shared_expert", width)
        yield Match(f"{our_mlp}.shared_gate", (f"{hf_moe}.shared_expert_gate.weight",))


def t5_matches(m: ModelConfig) -> Matches:
    """Yield one Match for each parameter of a T5, mT5 or UMT5 besides the output matrix."""
    yield Match("embedding.word_embeddings.weight", ("shared.weight",))
    for stack, layers in (("encoder", m.num_layers), ("decoder", m.decoder_layers)):
        # In a T5 and mT5, layer 0 holds the table of relative positions for all layers; in a UMT5 each layer has one.
        for layer in range(layers if m.relative_attention_per_layer else 1):
            our_bias = f"{stack}.relative_positions"
            if m.relative_attention_per_layer:
                our_bias += f".{layer}"
            hf_bias = f"{stack}.block.{layer}.layer.0.SelfAttention.relative_attention_bias.weight"
            yield Match(f"{our_bias}.weight", (hf_bias,))
        for layer in range(layers):
            yield from _t5_layer_matches(m, stack, layer)
        yield Match(f"{stack}.final_norm.norm.weight", (f"{stack}.final_layer_norm.weight",))


def _t5_layer_matches(m: ModelConfig, stack: str, layer: int) -> Matches:
    """Yield the matches of layer `layer` of the encoder or decoder."""
    our_layer = f"{stack}.layers.{layer}"
    hf_layer = f"{stack}.block.{layer}.layer"
    heads = m.num_attention_heads
    norms = ["input_layernorm", "post_attention_layernorm"]
    if stack == "decoder":
        norms.insert(1, "cross_layernorm")
    # Hugging Face numbers the sublayers: 0 self-attention, 1 cross-attention in a decoder, and last the MLP.
    for sublayer, norm in enumerate(norms):
        yield Match(f"{our_layer}.{norm}.weight", (f"{hf_layer}.{sublayer}.layer_norm.weight",))
    hf_attention = f"{hf_layer}.0.SelfAttention"
    hf_qkv = (f"{hf_attention}.q.weight", f"{hf_attention}.k.weight", f"{hf_attention}.v.weight")
    yield _interleaved(f"{our_layer}.attention.query_key_value.weight", hf_qkv, heads)
    yield Match(f"{our_layer}.attention.dense.weight", (f"{hf_attention}.o.weight",))
    if stack == "decoder":
        hf_cross = f"{hf_layer}.1.EncDecAttention"
        yield Match(f"{our_layer}.cross_attention.query.weight", (f"{hf_cross}.q.weight",))
        hf_key_value = (f"{hf_cross}.k.weight", f"{hf_cross}.v.weight")
        yield _interleaved(f"{our_layer}.cross_attention.key_value.weight", hf_key_value, heads)
        yield Match(f"{our_layer}.cross_attention.dense.weight", (f"{hf_cross}.o.weight",))
    hf_mlp = f"{hf_layer}.{len(norms) - 1}.DenseReluDense"
    our_up = f"{our_layer}.mlp.dense_h_to_4h.weight"
    if m.is_gated:
        yield _interleaved(our_up, (f"{hf_mlp}.wi_0.weight", f"{hf_mlp}.wi_1.weight"), m.ff_size)
    else:
        yield Match(our_up, (f"{hf_mlp}.wi.weight",))
    yield Match(f"{our_layer}.mlp.dense_4h_to_h.weight", (f"{hf_mlp}.wo.weight",))
