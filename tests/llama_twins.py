"""Small Llama, Qwen and Mistral models of Hugging Face, and flags and weights of the same models in this project."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.model import global_parameters

VOCAB = 61
FLAGS = (
    "--family llama --position-embedding rope --normalization rmsnorm --activation swiglu --no-hidden-bias "
    "--hidden-dropout 0 "
    f"--attention-dropout 0 --vocab-size {VOCAB} --make-vocab-size-divisible-by 16 --max-position-embeddings 64 "
    "--seq-length 24"
)
OF_KIND = {"Llama": "", "Qwen2": "--qkv-bias", "Qwen3": "--qk-norm", "Mistral": ""}


class Sizes(NamedTuple):
    """Sizes of a model. groups: key-value heads. head: size of a head. inner: hidden size of the MLP."""

    layers: int = 2
    hidden: int = 32
    heads: int = 8
    groups: int = 2
    head: int = 6
    inner: int = 44


USUAL = Sizes()


def flags_of(kind: str, sizes: Sizes = USUAL, tied: bool = False, window: int | None = None) -> str:
    flags = (
        f"{FLAGS} {OF_KIND[kind]} --num-layers {sizes.layers} --hidden-size {sizes.hidden} --num-attention-heads "
        f"{sizes.heads} "
        f"--num-key-value-heads {sizes.groups} --kv-hidden-size {sizes.head} --ff-hidden-size {sizes.inner}"
    )
    flags += "" if tied else " --no-tie-embeddings"
    return flags + (f" --sliding-window {window}" if window else "")


def theirs(
    kind: str,
    sizes: Sizes = USUAL,
    tied: bool = False,
    window: int | None = None,
    rope: Mapping[str, Any] | None = None,
    vocab: int = VOCAB,
) -> Any:
    """Return a transformers model with eager attention, and with random weights so large that mistakes show."""
    import transformers

    more: dict[str, Any] = {"sliding_window": window} if kind == "Mistral" else {}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.groups,
        head_dim=sizes.head,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, **(rope or {})},
        **more,
    )
    torch.manual_seed(5)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for p in model.parameters():
        nn.init.normal_(p, mean=float(p.dim() == 1), std=0.15)
    return model


def exact(model: Any) -> Any:
    """Convert a transformers model to fp64, including norms and softmax, which transformers computes in fp32.

    Tables of rotary angles stay in fp32, as in this project's models.
    """

    def norm(module: Any) -> Any:
        return lambda x: module.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)

    model = model.double()
    model.set_attn_implementation("sdpa")
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = norm(module)
    return model


def ours_of(w: Mapping[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
    """Convert weights or gradients from transformers' names and layout to this project's."""

    def fused(prefix: str, what: str) -> Tensor:
        query, key, value = (
            w[f"{prefix}.{name}_proj.{what}"].view(
                sizes.groups, -1, sizes.head, *w[f"{prefix}.{name}_proj.{what}"].shape[1:]
            )
            for name in "qkv"
        )
        return torch.cat([query, key, value], 1).flatten(0, 2)

    found = {
        "embedding.word_embeddings.weight": w["model.embed_tokens.weight"],
        "final_norm.norm.weight": w["model.norm.weight"],
    }
    if "lm_head.weight" in w:
        found["head.word_embeddings.weight"] = w["lm_head.weight"]
    for i in range(sizes.layers):
        at, there = f"layers.{i}", f"model.layers.{i}"
        found[f"{at}.input_layernorm.weight"] = w[f"{there}.input_layernorm.weight"]
        found[f"{at}.post_attention_layernorm.weight"] = w[f"{there}.post_attention_layernorm.weight"]
        found[f"{at}.attention.query_key_value.weight"] = fused(f"{there}.self_attn", "weight")
        if f"{there}.self_attn.q_proj.bias" in w:
            found[f"{at}.attention.query_key_value.bias"] = fused(f"{there}.self_attn", "bias")
        for norm, name in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
            if f"{there}.self_attn.{name}.weight" in w:
                found[f"{at}.attention.{norm}.weight"] = w[f"{there}.self_attn.{name}.weight"]
        found[f"{at}.attention.dense.weight"] = w[f"{there}.self_attn.o_proj.weight"]
        pairs = [w[f"{there}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
        found[f"{at}.mlp.dense_h_to_4h.weight"] = torch.stack(pairs, 1).flatten(0, 1)
        found[f"{at}.mlp.dense_4h_to_h.weight"] = w[f"{there}.mlp.down_proj.weight"]
    return found


@torch.no_grad()
def copy_weights(model: Any, ours: nn.Module, sizes: Sizes) -> None:
    found = ours_of(dict(model.named_parameters()), sizes)
    assert found.keys() == dict(global_parameters(ours)).keys()
    for name, p in global_parameters(ours):
        p.zero_()[: len(found[name])].copy_(found[name])


@torch.no_grad()
def load_ours(model: Any, w: Mapping[str, Tensor], sizes: Sizes) -> None:
    """Fill a transformers model with weights `w` in this project's names and layout, the inverse of `ours_of`."""
    for name, p in model.named_parameters():
        p.copy_(_their(name, w, sizes))


def _their(name: str, w: Mapping[str, Tensor], sizes: Sizes) -> Tensor:
    whole = {
        "model.embed_tokens.weight": "embedding.word_embeddings.weight",
        "model.norm.weight": "final_norm.norm.weight",
        "lm_head.weight": "head.word_embeddings.weight",
    }
    if name in whole:
        return w[whole[name]]
    at, _, rest = name.removeprefix("model.").replace("self_attn", "attention").rpartition(".")
    for theirs, ours in (("q_norm", "query_norm"), ("k_norm", "key_norm"), ("o_proj", "dense")):
        at = at.replace(theirs, ours)
    for rows, theirs in enumerate(("gate_proj", "up_proj")):
        if theirs in at:
            return w[f"{at.replace(theirs, 'dense_h_to_4h')}.{rest}"][rows::2]
    for rows, theirs in ((slice(0, -2), "q_proj"), (slice(-2, -1), "k_proj"), (slice(-1, None), "v_proj")):
        if theirs in at:
            fused = w[f"{at.replace(theirs, 'query_key_value')}.{rest}"]
            return fused.view(sizes.groups, -1, sizes.head, *fused.shape[1:])[:, rows].flatten(0, 2)
    return w[f"{at.replace('down_proj', 'dense_4h_to_h')}.{rest}"]
