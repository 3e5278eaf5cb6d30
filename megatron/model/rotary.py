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
from megatron.config.decoder import OF_ANGLES

from .masks import cached_on, positions_in_documents


class Rotation(NamedTuple):
    """Cosine and sine of the angle of each token and pair, fp32 [s, b or 1, 1, r/2] each."""

    cos: Tensor
    sin: Tensor


def frequencies(m: ModelConfig, device: torch.device) -> Tensor:
    """Return the angle by which each pair rotates per position, fp32 [r/2], scaled by --rope-scaling."""
    r = m.rotary_size
    turns = 1.0 / m.rope_theta ** (torch.arange(0, r, 2, dtype=torch.float32, device=device) / r)
    if m.rope_scaling == "linear":  # position interpolation (Chen et al. 2023)
        return turns / m.rope_scaling_factor
    if m.rope_scaling == "llama3":
        return _llama3(m, turns)
    return _yarn(m, turns) if m.rope_scaling == "yarn" else turns


def _llama3(m: ModelConfig, turns: Tensor) -> Tensor:
    """Scale `turns` [r/2], the angle per position of each pair, as Llama 3.1 does (Grattafiori et al. 2024).

    Pairs of long wavelength are interpolated, pairs of short wavelength are unchanged, and pairs between are blended.
    """
    length = m.rope_original_length or 0
    low = m.rope_low_freq_factor
    high = m.rope_high_freq_factor
    wave = 2 * math.pi / turns
    kept = ((length / wave - low) / (high - low)).clamp(0, 1)
    between = (1 - kept) * turns / m.rope_scaling_factor + kept * turns
    stretched = torch.where(wave > length / low, turns / m.rope_scaling_factor, turns)
    return torch.where((kept > 0) & (kept < 1), between, stretched)


def _yarn(m: ModelConfig, turns: Tensor) -> Tensor:
    """Scale `turns` [r/2], the angle per position of each pair, by YaRN (Peng et al. 2023).

    Pairs that rotate often within the original context length are unchanged, pairs that rotate rarely are interpolated,
    and a linear ramp blends the pairs between.
    """
    r = m.rotary_size
    length = m.rope_original_length or 0

    def pair_that_turns(times: float) -> float:
        return r * math.log(length / (times * 2 * math.pi)) / (2 * math.log(m.rope_theta))

    first = max(math.floor(pair_that_turns(m.rope_beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(m.rope_beta_slow)), r - 1)
    ramp = (torch.arange(r // 2, dtype=torch.float32, device=turns.device) - first) / (last - first or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return turns / m.rope_scaling_factor * (1 - kept) + turns * kept


def attention_factor(m: ModelConfig) -> float:
    """Return the factor of queries and keys: 1, or with YaRN a factor that sharpens attention in long contexts."""
    if m.rope_scaling != "yarn":
        return 1.0
    if m.rope_attention_factor is not None:
        return m.rope_attention_factor
    return 0.1 * math.log(m.rope_scaling_factor) + 1.0


def rotation(
    m: ModelConfig,
    document_ids: Tensor,
    length: int,
    seen: int = 0,
    restart: bool = False,
    context: mpu.Axis | None = None,
) -> Rotation:
    """Return the rotation of `length` tokens after `seen` cached tokens.

    restart: count positions from 0 in each document of document ids [b, s], if these are not empty.
    context: keep only the tokens of this context rank.
    All layers with the same settings and the same `document_ids` share the result.
    """

    def make() -> tuple[Tensor, Tensor]:
        if restart and document_ids.numel():
            place = positions_in_documents(document_ids).t()  # [s, b]
        else:
            place = torch.arange(seen, seen + length, device=document_ids.device).unsqueeze(1)  # [s, 1]
        if context is not None:
            place = mpu.shard_sequence(place, 0, context)
        angle = place[..., None, None].float() * frequencies(m, document_ids.device)
        factor = attention_factor(m)
        return angle.cos() * factor, angle.sin() * factor

    # The cache key contains these settings because two models may receive the same ids: a teacher and its student, or
    # a model and the draft model of speculative decoding.
    angles = m.rotary_size, *[getattr(m, name) for name in OF_ANGLES]
    share = None if context is None else (context.rank, context.size)
    return Rotation(*cached_on(document_ids, ("rotation", length, seen, restart, share, angles), None, make))


def rotate(x: Tensor, angles: Rotation | None, back: bool = False) -> Tensor:
    """Return x [s, b, ..., d], rotated by `angles`, as a new tensor of the same shape.

    back: rotate by the opposite angles, as the backward pass does with gradients.
    """
    if angles is None:
        return x
    cos, sin = _fitting(angles, x)
    half = cos.shape[-1]
    sin = -sin if back else sin
    a = x[..., :half]
    b = x[..., half : 2 * half]
    rest = x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def _fitting(angles: Rotation, x: Tensor) -> list[Tensor]:
    """Return cosine and sine in the dtype of x [s, b, ..., d], with as many dimensions as x."""
    return [each.to(x.dtype).view(*each.shape[:2], *[1] * (x.dim() - 3), -1) for each in angles]


def rotate_into(place: Tensor, x: Tensor, angles: Rotation | None, back: bool = False) -> None:
    """Write x [s, b, ..., d], rotated by `angles`, to `place`, which has the shape of x. back: see `rotate`."""
    if angles is None:
        place.copy_(x)
        return
    cos, sin = _fitting(angles, x)
    half = cos.shape[-1]
    sign = -1 if back else 1
    a = x[..., :half]
    b = x[..., half : 2 * half]
    torch.mul(a, cos, out=place[..., :half])
    place[..., :half].addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=place[..., half : 2 * half])
    place[..., half : 2 * half].addcmul_(a, sin, value=sign)
    place[..., 2 * half :].copy_(x[..., 2 * half :])
