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

    ours: str
    theirs: tuple[str, ...]
    split: Callable[[Tensor], Parts] = lambda tensor: [tensor]  # converts our tensor to Hugging Face's
    join: Callable[[Parts], Tensor] = lambda tensors: tensors[0]  # the reverse of `split`


Matches = Iterator[Match]


def _transposed(match: Match) -> Match:
    """Return `match` with Hugging Face's matrix transposed."""

    def split(t: Tensor) -> Parts:
        return [part.T for part in match.split(t)]

    def join(ts: Parts) -> Tensor:
        return match.join([t.T for t in ts])

    return Match(match.ours, match.theirs, split, join)


def _stacked_heads(ours: str, theirs: str, heads: int) -> Match:
    """Match two fused tensors of query, key and value rows.

    Our rows are ordered by head: q, k and v of head 0, then of head 1, and so on. Hugging Face's tensor holds all q
    rows, then all k rows, then all v rows.
    """

    # Two heads: our rows q0 k0 v0 q1 k1 v1 are q0 q1 k0 k1 v0 v1 in Hugging Face's tensor.
    def split(t: Tensor) -> list[Tensor]:
        by_head = t.view(heads, 3, -1, *t.shape[1:])
        return [by_head.transpose(0, 1).reshape(t.shape)]

    def join(ts: Parts) -> Tensor:
        t = ts[0]
        by_kind = t.reshape(3, heads, -1, *t.shape[1:])
        return by_kind.transpose(0, 1).reshape(t.shape)

    return Match(ours, (theirs,), split, join)


def _interleaved(ours: str, theirs: tuple[str, ...], groups: int) -> Match:
    """Match separate Hugging Face tensors with our tensor, which interleaves their rows group by group.

    groups: number of groups. A group is a head (for query, key and value) or a feature (for gate and up projection).
    """

    # Two groups of two tensors: our rows a0 b0 a1 b1 are a0 a1 and b0 b1 in Hugging Face's tensors.
    def split(t: Tensor) -> list[Tensor]:
        parts = t.view(groups, len(theirs), -1, *t.shape[1:])
        return [part.reshape(-1, *t.shape[1:]) for part in parts.unbind(1)]

    def join(ts: Parts) -> Tensor:
        by_group = [t.view(groups, -1, *t.shape[1:]) for t in ts]
        return torch.stack(by_group, 1).flatten(0, 2)

    return Match(ours, theirs, split, join)


def _grouped_heads(ours: str, theirs: tuple[str, ...], groups: int, size: int) -> Match:
    """Match Hugging Face's separate q, k and v tensors with our fused tensor for grouped-query attention.

    Our rows are ordered by group: all query heads of the group, then its key head, then its value head. groups: number
    of groups. size: number of rows of one head.
    """

    # Four query heads in two groups: our heads q0 q1 k0 v0 q2 q3 k1 v1 are q0 q1 q2 q3, k0 k1 and v0 v1 in theirs.
    def split(t: Tensor) -> list[Tensor]:
        heads = t.view(groups, -1, size, *t.shape[1:])
        queries = heads[:, :-2]
        keys = heads[:, -2:-1]
        values = heads[:, -1:]
        return [part.flatten(0, 2) for part in (queries, keys, values)]

    def join(ts: Parts) -> Tensor:
        by_group = [t.view(groups, -1, size, *t.shape[1:]) for t in ts]
        return torch.cat(by_group, 1).flatten(0, 2)

    return Match(ours, theirs, split, join)


def matches_of(m: ModelConfig) -> Matches:
    """Yield one Match for each parameter of a model, whatever its family.

    Hugging Face's models have no factors of muP and fixed factors of attention scores, so the weights that a match
    converts are multiplied by the factors of our model.
    """
    by_family = {"gpt2": gpt2_matches, "llama": llama_matches, "t5": t5_matches}
    matches = by_family[m.family or "gpt2"]
    for match in matches(m):
        factor = _factor(m, match.ours)
        yield _folded(match, factor, m)


def _factor(m: ModelConfig, name: str) -> float:
    """Return the factor by which our model multiplies what it computes from the weight `name`, and theirs does not.

    The factor of the logits is that of the norm before them, because the embedding may be tied to the output matrix.
    """
    at = name.rsplit(".", 2)[-2]
    if name.startswith(("final_norm.", "decoder.final_norm.")):
        theirs = m.hidden_size**-0.5 if m.scale_tied_logits else 1.0
        return m.logits_scale / theirs
    if at in ("dense", "dense_4h_to_h"):
        return m.decoder_branch_factor if name.startswith("decoder.") else m.branch_factor
    with_queries = ("query_norm",) if m.qk_norm else ("query_key_value", "query")
    if at not in with_queries:
        return 1.0
    divides = m.scale_attention and m.family != "t5"  # Hugging Face's T5 never divides scores by sqrt(head size)
    theirs = m.head_size**-0.5 if divides else 1.0
    return m.attention_scale / theirs


def _folded(match: Match, factor: float, m: ModelConfig) -> Match:
    """Return `match` with our weight multiplied by `factor`: only its queries, if it also holds keys and values."""
    if abs(factor - 1.0) < 1e-12:
        return match

    def scaled(t: Tensor, by: float) -> Tensor:
        if ".query_key_value." not in match.ours:
            return t * by
        heads = t.reshape(m.key_value_heads, -1, m.head_size, *t.shape[1:])  # queries of a group, its key, its value
        queries = heads[:, :-2] * by
        return torch.cat([queries, heads[:, -2:]], 1).reshape(t.shape)

    def split(t: Tensor) -> Parts:
        return match.split(scaled(t, factor))

    def join(ts: Parts) -> Tensor:
        return scaled(match.join(ts), 1 / factor)

    return Match(match.ours, match.theirs, split, join)


def gpt2_matches(m: ModelConfig) -> Matches:
    """Yield one Match for each parameter of a GPT-2."""
    yield Match("embedding.word_embeddings.weight", ("transformer.wte.weight",))
    yield Match("position_embedding.weight", ("transformer.wpe.weight",))
    names = {"attention.dense": "attn.c_proj", "mlp.dense_h_to_4h": "mlp.c_fc", "mlp.dense_4h_to_h": "mlp.c_proj"}
    for i in range(m.num_layers):
        at = f"layers.{i}"
        its = f"transformer.h.{i}"
        for kind in ("weight", "bias"):
            yield Match(f"{at}.input_layernorm.{kind}", (f"{its}.ln_1.{kind}",))
            yield Match(f"{at}.post_attention_layernorm.{kind}", (f"{its}.ln_2.{kind}",))
            fused = f"{at}.attention.query_key_value.{kind}"
            linear = [_stacked_heads(fused, f"{its}.attn.c_attn.{kind}", m.num_attention_heads)]
            linear += [Match(f"{at}.{ours}.{kind}", (f"{its}.{theirs}.{kind}",)) for ours, theirs in names.items()]
            yield from map(_transposed, linear) if kind == "weight" else linear
    for kind in ("weight", "bias"):
        yield Match(f"final_norm.norm.{kind}", (f"transformer.ln_f.{kind}",))
    if not m.tie_embeddings:
        yield Match("head.word_embeddings.weight", ("lm_head.weight",))


def llama_matches(m: ModelConfig) -> Matches:
    """Yield one Match for each parameter of a Llama, Qwen, Mistral or Mixtral."""
    yield Match("embedding.word_embeddings.weight", ("model.embed_tokens.weight",))
    of_qkv = ("weight", "bias") if m.has_qkv_bias else ("weight",)
    of_others = ("weight", "bias") if m.hidden_bias else ("weight",)
    for i in range(m.num_layers):
        at = f"layers.{i}"
        its = f"model.layers.{i}"
        attention = f"{its}.self_attn"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield Match(f"{at}.{norm}.weight", (f"{its}.{norm}.weight",))
        for kind in of_qkv:
            heads = (f"{attention}.q_proj.{kind}", f"{attention}.k_proj.{kind}", f"{attention}.v_proj.{kind}")
            yield _grouped_heads(f"{at}.attention.query_key_value.{kind}", heads, m.key_value_heads, m.head_size)
        if m.qk_norm:
            yield Match(f"{at}.attention.query_norm.weight", (f"{attention}.q_norm.weight",))
            yield Match(f"{at}.attention.key_norm.weight", (f"{attention}.k_norm.weight",))
        for kind in of_others:
            yield Match(f"{at}.attention.dense.{kind}", (f"{attention}.o_proj.{kind}",))
            if not m.has_experts(i):
                yield from _gated_mlp(f"{at}.mlp", f"{its}.mlp", m.ff_size, kind)
        if m.has_experts(i):
            yield from _mixture(m, f"{at}.mlp", its)
    yield Match("final_norm.norm.weight", ("model.norm.weight",))
    if not m.tie_embeddings:
        yield Match("head.word_embeddings.weight", ("lm_head.weight",))


def _gated_mlp(
    at: str, its: str, width: int, kind: str = "weight", names: Sequence[str] = ("gate_proj", "up_proj", "down_proj")
) -> Matches:
    """Yield the matches of a gated MLP. names: Hugging Face's names of gate, up and down projection."""
    gate, up, down = (f"{its}.{name}.{kind}" for name in names)
    yield _interleaved(f"{at}.dense_h_to_4h.{kind}", (gate, up), width)
    yield Match(f"{at}.dense_4h_to_h.{kind}", (down,))


def _mixture(m: ModelConfig, at: str, layer: str) -> Matches:
    """Yield the matches of a mixture of experts, with the names of Qwen or, for the settings of Mixtral, Mixtral's."""
    its = f"{layer}.mlp"
    names = ("gate_proj", "up_proj", "down_proj")
    if not m.qk_norm and not m.num_shared_experts:
        its = f"{layer}.block_sparse_moe"
        names = ("w1", "w3", "w2")
    yield Match(f"{at}.router.weight", (f"{its}.gate.weight",))
    for e in range(m.num_experts or 0):
        yield from _gated_mlp(f"{at}.experts.{e}", f"{its}.experts.{e}", m.expert_ff_size, names=names)
    if m.num_shared_experts:
        width = m.num_shared_experts * m.expert_ff_size
        yield from _gated_mlp(f"{at}.shared_expert", f"{its}.shared_expert", width)
        yield Match(f"{at}.shared_gate", (f"{its}.shared_expert_gate.weight",))


def t5_matches(m: ModelConfig) -> Matches:
    """Yield one Match for each parameter of a T5, mT5 or UMT5."""
    yield Match("embedding.word_embeddings.weight", ("shared.weight",))
    for stack, layers in (("encoder", m.num_layers), ("decoder", m.decoder_layers)):
        for i in range(layers if m.relative_attention_per_layer else 1):
            ours = f"{stack}.relative_positions"
            if m.relative_attention_per_layer:
                ours += f".{i}"
            theirs = f"{stack}.block.{i}.layer.0.SelfAttention.relative_attention_bias.weight"
            yield Match(f"{ours}.weight", (theirs,))
        for i in range(layers):
            yield from _t5_block(m, stack, i)
        yield Match(f"{stack}.final_norm.norm.weight", (f"{stack}.final_layer_norm.weight",))
    if not m.tie_embeddings:
        yield Match("head.word_embeddings.weight", ("lm_head.weight",))


def _t5_block(m: ModelConfig, stack: str, i: int) -> Matches:
    """Yield the matches of layer `i` of the encoder or decoder."""
    at = f"{stack}.layers.{i}"
    its = f"{stack}.block.{i}.layer"
    heads = m.num_attention_heads
    norms = ["input_layernorm", "post_attention_layernorm"]
    if stack == "decoder":
        norms.insert(1, "cross_layernorm")
    for j, norm in enumerate(norms):
        yield Match(f"{at}.{norm}.weight", (f"{its}.{j}.layer_norm.weight",))
    own = f"{its}.0.SelfAttention"
    fused = (f"{own}.q.weight", f"{own}.k.weight", f"{own}.v.weight")
    yield _interleaved(f"{at}.attention.query_key_value.weight", fused, heads)
    yield Match(f"{at}.attention.dense.weight", (f"{own}.o.weight",))
    if stack == "decoder":
        cross = f"{its}.1.EncDecAttention"
        yield Match(f"{at}.cross_attention.query.weight", (f"{cross}.q.weight",))
        key_value = (f"{cross}.k.weight", f"{cross}.v.weight")
        yield _interleaved(f"{at}.cross_attention.key_value.weight", key_value, heads)
        yield Match(f"{at}.cross_attention.dense.weight", (f"{cross}.o.weight",))
    mlp = f"{its}.{len(norms) - 1}.DenseReluDense"
    up = f"{at}.mlp.dense_h_to_4h.weight"
    if m.gated:
        yield _interleaved(up, (f"{mlp}.wi_0.weight", f"{mlp}.wi_1.weight"), m.ff_size)
    else:
        yield Match(up, (f"{mlp}.wi.weight",))
    yield Match(f"{at}.mlp.dense_4h_to_h.weight", (f"{mlp}.wo.weight",))
