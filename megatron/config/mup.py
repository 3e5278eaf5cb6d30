"""muP: learning rates of matrices that are larger than those of the base model, and the note on the base's sizes.

The rules are those of Yang et al. 2022 (table 8) for Adam, and of Yang et al. 2023 (https://arxiv.org/abs/2310.17813)
for Muon. `ModelConfig.init_std` has the rule for initial values.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from .fields import flag, problems_where

if TYPE_CHECKING:
    from .model import ModelConfig

# Settings whose defaults take for granted that the base model has the proportions of this model.
IMPLIED_BASE_SIZES = (
    "mup_base_ff_hidden_size",
    "mup_base_expert_ff_hidden_size",
    "mup_base_num_key_value_heads",
    "mup_base_num_decoder_layers",
)
# Settings that describe the base model and need its width, too.
BASE_SIZES = ("mup_base_kv_hidden_size", "mup_base_num_layers", *IMPLIED_BASE_SIZES)


class Growth(NamedTuple):
    """Numbers of inputs and outputs of a matrix, divided by those of the same matrix in the base model."""

    inputs: float = 1.0
    outputs: float = 1.0


def muon_divisor(growth: tuple[float, float], shape: tuple[int, ...], adjust_lr_fn: str) -> float:
    """Return the divisor of Muon's learning rate for a matrix of this shape.

    From the base model to this one, the largest singular value of an update must grow by sqrt(outputs / inputs). It is
    the learning rate times `muon_ratio`, so it already grows by muon_ratio(shape) / muon_ratio(shape in the base). The
    divisor removes the difference.
    growth: see `Growth`. shape: (outputs, inputs) of the matrix. adjust_lr_fn: --muon-adjust-lr-fn.
    """
    inputs, outputs = growth
    # The formula below gives these values, too, but with rounding errors. Weights with different divisors would be in
    # different parameter groups.
    if inputs == outputs:
        return math.sqrt(inputs) if adjust_lr_fn == "match_rms_adamw" else 1.0
    base_ratio = muon_ratio((shape[0] / outputs, shape[1] / inputs), adjust_lr_fn)
    return math.sqrt(inputs / outputs) * muon_ratio(shape, adjust_lr_fn) / base_ratio


def muon_ratio(shape: tuple[float, ...], adjust_lr_fn: str) -> float:
    """Return torch.optim.Muon's factor of the learning rate of a matrix of this shape, with muP and without."""
    if adjust_lr_fn == "original":
        return math.sqrt(max(1.0, shape[0] / shape[1]))
    return 0.2 * math.sqrt(max(shape))  # 0.2 is about the RMS of AdamW's updates


def notes(m: "ModelConfig", uses_muon: bool) -> Iterator[str]:
    """Yield a note with the sizes that muP's factors take for granted in the base model, if they are not given.

    uses_muon: whether Muon steps the matrices. Only its factors depend on the number of key/value heads.
    """
    # All factors are 1 without muP, and if this model is as large as the base model.
    if {m.width_factor, m.ff_growth, m.expert_ff_growth, m.branch_factor, m.decoder_branch_factor} == {1.0}:
        return
    base_head_size = m.mup_base_kv_hidden_size or m.head_size
    # Heads of the base model / heads of this model. Heads x their width grow by `width_factor`, as --hidden-size does:
    # a model that is 4 times as wide, with heads of 128 instead of 64, has twice as many heads, so the ratio is 1/2.
    heads_ratio = m.head_size / base_head_size / m.width_factor
    follows_heads = uses_muon and m.num_key_value_heads and not m.mup_base_num_key_value_heads
    follows_depth = m.family == "t5" and m.mup_base_num_layers and not m.mup_base_num_decoder_layers
    sizes = problems_where(
        # The condition is always true: no flag gives the number of heads of the base model.
        (True, f"--num-attention-heads {m.num_attention_heads * heads_ratio:g} of width {base_head_size}"),
        (follows_heads, f"--num-key-value-heads {m.key_value_heads * heads_ratio:g}"),
        (not m.mup_base_ff_hidden_size, f"--ff-hidden-size {m.ff_size / m.ff_growth:g}"),
        (
            m.expert_ff_hidden_size and not m.mup_base_expert_ff_hidden_size,
            f"--expert-ff-hidden-size {m.expert_ff_size / m.expert_ff_growth:g}",
        ),
        # branch_factor**2 is base layers / layers.
        (follows_depth, f"--num-decoder-layers {m.decoder_layers * m.branch_factor**2:g}"),
    )
    yield (
        f"muP takes for granted that the base model has {', '.join(sizes)}: if its heads are narrower, give their "
        f"width as --mup-base-kv-hidden-size; give other sizes as {', '.join(map(flag, IMPLIED_BASE_SIZES))}"
    )
