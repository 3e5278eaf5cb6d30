"""Relative positions of T5: a learned bias per head and distance bucket, added to the scores (Raffel et al. 2020).

Shapes: q queries, k keys, n heads, t model-parallel ranks, r buckets.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron import mpu
from megatron.config import ModelConfig


def buckets(distance: Tensor, count: int, furthest: int, causal: bool) -> Tensor:
    """Map distance, key position - query position, int64 [...], to buckets 0 to count - 1.

    Each direction has half of the buckets. If causal, the past has all buckets, because later keys are not visible.
    Half of a direction's buckets hold one distance each. Its other buckets widen logarithmically up to `furthest`.
    """
    found = torch.zeros_like(distance)
    if not causal:
        count //= 2
        found = (distance > 0).long() * count
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = count // 2
    far = torch.log(distance.clamp(min=1).float() / exact) / math.log(furthest / exact) * (count - exact)
    return found + torch.where(distance < exact, distance, (exact + far.long()).clamp(max=count - 1))


class RelativePositions(nn.Module):
    """Table of relative positions, as a layer before each transformer layer.

    Either the transformer layers of a stack share one table (the table's layers are tied), or each has its own.
    weight: [r, n/t], for r buckets and this rank's heads.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        axis = mpu.get_mesh().model
        heads = config.num_attention_heads
        self.weight = mpu.declare(
            nn.Parameter(torch.empty(config.relative_attention_num_buckets, heads // axis.size)),
            mpu.normal(config.init_method_std),
            dim=1,
            full_size=heads,
            axis=axis,
        )

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Pass the table to the layer after it: (...) -> (..., weight [r, n/t])."""
        return *inputs, self.weight


def position_bias(table: Tensor, queries: int, keys: int, config: ModelConfig, causal: bool) -> Tensor:
    """Look up the bias of the last `queries` of `keys` positions in table [r, n/t] -> [1, n/t, q, k].

    The look-ups run in at least fp32, because their backward pass adds many gradients to each row of the table.
    """
    wide = table.to(torch.promote_types(table.dtype, torch.float32))
    count = config.relative_attention_num_buckets
    furthest = config.relative_attention_max_distance
    if "relative-positions" in config.reference_ops:
        seen = torch.arange(keys, device=table.device)
        each = buckets(seen - seen[keys - queries :].unsqueeze(1), count, furthest, causal)  # [q, k]
        return F.embedding(each, wide).to(table.dtype).permute(2, 0, 1).unsqueeze(0)
    # Look up all distances once, as one row. Each query's bias is a window of this row, and the window of the next
    # query begins one element further left.
    distance = torch.arange(1 - keys, queries, device=table.device)
    row = F.embedding(buckets(distance, count, furthest, causal), wide).t().contiguous()  # [n/t, q + k - 1]
    return row.unfold(1, keys, 1).flip(1).to(table.dtype).unsqueeze(0)
