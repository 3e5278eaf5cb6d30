"""Rotary positions (Su et al. 2021): pairs of elements are rotated by angles that grow with the position.

Elements i and i + r/2 of a head form a pair, as in Hugging Face. Only the first r of d elements are rotated
(--rotary-percent). Angles, cosines and sines are always fp32; they are applied in the dtype of queries and
keys.
Shapes: s sequence, b batch, n heads, d width of a head, r rotated elements of a head.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megatron import mpu
from megatron.config import ModelConfig
from megatron.config.decoder import ANGLE_SETTINGS

from .masks import cached_on, positions_in_documents


class Rotation(NamedTuple):
    """Cosine and sine of the angle of each token and pair, fp32 [s, b or 1, 1, r/2] each."""

    cos: Tensor
    sin: Tensor


def inverse_frequencies(m: ModelConfig, device: torch.device) -> Tensor:
    """Return the angle by which each pair rotates per position, fp32 [r/2], scaled by --rope-scaling."""
    r = m.rotary_size
    inv_freq = 1.0 / m.rope_theta ** (torch.arange(0, r, 2, dtype=torch.float32, device=device) / r)
    if m.rope_scaling == "linear":  # position interpolation (Chen et al. 2023)
        return inv_freq / m.rope_scaling_factor
    if m.rope_scaling == "llama3":
        return _scale_by_llama3(m, inv_freq)
    if m.rope_scaling == "yarn":
        return _scale_by_yarn(m, inv_freq)
    return inv_freq


def _scale_by_llama3(m: ModelConfig, inv_freq: Tensor) -> Tensor:
    """Scale `inv_freq` [r/2], the angle per position of each pair, as Llama 3.1 does (Grattafiori et al. 2024).

    Pairs of long wavelength are interpolated, pairs of short wavelength are unchanged, and pairs between are blended.
    """
    length = m.rope_original_length or 0  # never 0: llama3 requires the setting, as the type checker cannot know
    low = m.rope_low_freq_factor
    high = m.rope_high_freq_factor
    wavelength = 2 * math.pi / inv_freq  # in tokens
    turns = length / wavelength  # of each pair, within the original context
    # 0 for pairs that make at most `low` turns: interpolated. 1 for pairs that make at least `high` turns: unchanged.
    unscaled_share = ((turns - low) / (high - low)).clamp(0, 1)
    # For the shares 0 and 1, one summand is exactly 0, so the result has no rounding error of a blend.
    return (1 - unscaled_share) * inv_freq / m.rope_scaling_factor + unscaled_share * inv_freq


def _scale_by_yarn(m: ModelConfig, inv_freq: Tensor) -> Tensor:
    """Scale `inv_freq` [r/2], the angle per position of each pair, by YaRN (Peng et al. 2023).

    Pairs that rotate often within the original context length are unchanged, pairs that rotate rarely are interpolated,
    and a linear ramp blends the pairs between.
    """
    r = m.rotary_size
    length = m.rope_original_length or 0

    def pair_rotating(rotations: float) -> float:
        # Solves rotations = length / (2 pi theta^(2 pair / r)) for the number of the pair.
        return r * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(m.rope_theta))

    # Pairs rotate more slowly the higher their number. Those before `first` rotate more than rope_beta_fast times and
    # are unchanged. Those after `last` rotate less than rope_beta_slow times and are interpolated.
    first = max(math.floor(pair_rotating(m.rope_beta_fast)), 0)
    last = min(math.ceil(pair_rotating(m.rope_beta_slow)), r - 1)  # Hugging Face has the same limit, not r/2 - 1
    width = last - first or 0.001  # if first = last, 0.001 avoids a division by zero
    pairs = torch.arange(r // 2, dtype=torch.float32, device=inv_freq.device)
    ramp = (pairs - first) / width
    unscaled_share = 1 - ramp.clamp(0, 1)
    return inv_freq / m.rope_scaling_factor * (1 - unscaled_share) + inv_freq * unscaled_share


def attention_factor(m: ModelConfig) -> float:
    """Return the factor of queries and keys: 1, or with YaRN a factor that sharpens attention in long contexts."""
    if m.rope_scaling != "yarn":
        return 1.0
    if m.rope_attention_factor is not None:
        return m.rope_attention_factor
    return 0.1 * math.log(m.rope_scaling_factor) + 1.0


def compute_rotation(
    m: ModelConfig,
    document_ids: Tensor,
    length: int,
    num_cached: int = 0,
    restart_positions: bool = False,
    *,
    context: mpu.Axis,
) -> Rotation:
    """Return the rotation of `length` tokens after `num_cached` cached tokens.

    restart_positions: count positions from 0 in each document of document ids [b, s], if these are not empty.
    context: keep only the tokens of this context rank.
    All layers with the same settings and the same `document_ids` share the result.
    """

    def make() -> Rotation:
        if restart_positions and document_ids.numel():
            position = positions_in_documents(document_ids).t()  # [s, b]
        else:
            position = torch.arange(num_cached, num_cached + length, device=document_ids.device).unsqueeze(1)  # [s, 1]
        position = mpu.shard_sequence(position, 0, context)
        # [s, b or 1, 1, r/2], where the 1 stands for all heads
        angle = position[..., None, None].float() * inverse_frequencies(m, document_ids.device)
        factor = attention_factor(m)
        return Rotation(angle.cos() * factor, angle.sin() * factor)

    # The cache key contains these settings because two models may receive the same ids: a teacher and its student, or
    # a model and the draft model of speculative decoding.
    angles = m.rotary_size, *[getattr(m, name) for name in ANGLE_SETTINGS]
    key = "rotation", length, num_cached, restart_positions, context.rank, context.size, angles
    return cached_on(document_ids, key, make)


def rotate(x: Tensor, angles: Rotation | None, inverse: bool = False) -> Tensor:
    """Return x [s, b, ..., d], rotated by `angles`, as a new tensor of the same shape.

    inverse: rotate by the opposite angles, as the backward pass does with gradients.
    """
    if angles is None:
        return x
    cos, sin = _match_dims(angles, x)
    if inverse:
        sin = -sin  # the cosine of the opposite angle is the same
    half = cos.shape[-1]  # r/2
    # Elements i and i + r/2 form a pair, and the elements from r on are not rotated.
    first, second, rest = x.tensor_split((half, 2 * half), -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def _match_dims(angles: Rotation, x: Tensor) -> list[Tensor]:
    """Return cosine and sine in the dtype of x [s, b, ..., d], with as many dimensions as x."""
    return [part.to(x.dtype).view(*part.shape[:2], *[1] * (x.dim() - 3), -1) for part in angles]


def rotate_into(out: Tensor, x: Tensor, angles: Rotation | None, inverse: bool = False) -> None:
    """Write x [s, b, ..., d], rotated by `angles`, to `out`, which has the shape of x. inverse: see `rotate`."""
    if angles is None:
        out.copy_(x)
        return
    cos, sin = _match_dims(angles, x)
    half = cos.shape[-1]
    sign = -1 if inverse else 1
    first, second, rest = x.tensor_split((half, 2 * half), -1)
    out_first, out_second, out_rest = out.tensor_split((half, 2 * half), -1)
    torch.mul(first, cos, out=out_first)
    out_first.addcmul_(second, sin, value=-sign)  # first * cos - second * sin
    torch.mul(second, cos, out=out_second)
    out_second.addcmul_(first, sin, value=sign)  # second * cos + first * sin
    out_rest.copy_(rest)
