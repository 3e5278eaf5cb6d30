"""Settings of a model's layers that contradict each other."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .fields import flag, problems_where
from .mup import BASE_SIZES

if TYPE_CHECKING:
    from .model import ModelConfig

# Position embeddings that each family supports.
FAMILY_POSITIONS = {"gpt2": ("learned",), "llama": ("rope",), "t5": ("learned", "relative")}
# Advice for positions that another script supports.
SCRIPT_ADVICE = {
    "rope": "; use pretrain_llama.py, for a GPT-2 with rotary positions with --normalization layernorm "
    "--activation gelu-tanh --hidden-bias --tie-embeddings --hidden-dropout 0.1 --attention-dropout 0.1",
    "learned": "; use pretrain_gpt2.py",
}


def problems_of_heads(m: "ModelConfig") -> Iterator[str]:
    """Yield an error text for each contradiction between the sizes of attention."""
    heads = m.num_attention_heads
    yield from problems_where(
        (
            m.kv_hidden_size is None and m.hidden_size % heads,
            f"--hidden-size {m.hidden_size} cannot be split among --num-attention-heads {heads}; choose a multiple or "
            "give --kv-hidden-size",
        ),
        (
            heads % m.key_value_heads,
            f"--num-attention-heads {heads} must be a multiple of --num-key-value-heads {m.key_value_heads}",
        ),
    )


def problems_of_positions(m: "ModelConfig") -> Iterator[str]:
    """Yield an error text for positions that the family does not have, and for rotary positions of odd size."""
    kind = m.position_embedding
    if m.family and kind not in FAMILY_POSITIONS[m.family]:
        supported = " or ".join(FAMILY_POSITIONS[m.family])
        yield f"--position-embedding {kind}: a {m.family} has {supported} positions{SCRIPT_ADVICE.get(kind, '')}"
    if kind == "rope" and (m.rotary_size % 2 or not m.rotary_size):
        yield (
            f"rotary positions rotate pairs of dimensions: --rotary-percent {m.rotary_percent:g} of "
            f"--kv-hidden-size {m.head_size} must be an even number of dimensions, not {m.rotary_size}"
        )


def problems_of_layers(m: "ModelConfig") -> Iterator[str]:
    """Yield an error text for each contradiction of experts, muP and relative positions with the other settings."""
    stack_sizes = [m.num_layers, m.decoder_layers] if m.family == "t5" else [m.num_layers]
    # One number n means the layers 0, n, 2n and so on. Several numbers are one for each layer, so every stack must have
    # as many layers.
    given = len(m.moe_layer_frequency)  # how many numbers the flag has
    if m.num_experts and given > 1 and any(given != layers for layers in stack_sizes):
        yield (
            f"--moe-layer-frequency has {given} numbers, but a stack has {max(stack_sizes)} layers; give one for each "
            "layer, or one number in all"
        )
    for name in BASE_SIZES:
        if m.mup_base_hidden_size is None and getattr(m, name) is not None:
            yield f"{flag(name)} needs --mup-base-hidden-size, too; {m.hidden_size} leaves the width unscaled"
    if m.relative_attention_per_layer and m.position_embedding != "relative":
        yield f"--relative-attention-per-layer needs relative positions, not {m.position_embedding}"
    # Half of the buckets hold one distance each; the other half shares the longer distances, up to the maximum.
    exact_buckets = m.relative_attention_num_buckets // 2
    if m.position_embedding == "relative" and m.relative_attention_max_distance <= exact_buckets:
        yield (
            f"--relative-attention-max-distance {m.relative_attention_max_distance} must be more "
            f"than {exact_buckets}: that many of --relative-attention-num-buckets {m.relative_attention_num_buckets} "
            "hold one distance each"
        )
