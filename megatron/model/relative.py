"""Relative positions of T5: a learned bias per head and distance bucket, added to the scores (Raffel et al. 2020).

Shapes: q queries, k keys, n heads, t model-parallel ranks, r buckets.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron import mpu
from megatron.config import ModelConfig


def distance_buckets(distance: Tensor, num_buckets: int, max_distance: int, causal: bool) -> Tensor:
    """Map distance, key position - query position, int64 [...], to buckets 0 to num_buckets - 1.

    Each direction has half of the buckets. If causal, the past has all buckets, because later keys are not visible.
    Half of a direction's buckets hold one distance each. Its other buckets widen logarithmically up to `max_distance`.
    """
    direction_offset = torch.zeros_like(distance)
    if causal:
        distance = (-distance).clamp(min=0)  # how far the key lies in the past
    else:
        num_buckets //= 2  # from here on those of one direction
        direction_offset = (distance > 0).long() * num_buckets
        distance = distance.abs()
    # For example, of 32 causal buckets with max_distance 128, buckets 0 to 15 hold the distances 0 to 15. Distances
    # from 16 to 127 share the buckets 16 to 31, and all larger ones are in bucket 31.
    num_exact = num_buckets // 2
    log_distance = torch.log(distance.clamp(min=1).float() / num_exact)  # log(0) would be minus infinity
    # It rises from num_exact for the distance num_exact to num_buckets for max_distance.
    log_bucket = num_exact + (log_distance / math.log(max_distance / num_exact) * (num_buckets - num_exact)).long()
    return direction_offset + torch.where(distance < num_exact, distance, log_bucket.clamp(max=num_buckets - 1))


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
    wide_table = table.to(mpu.wide_dtype(table))
    num_buckets = config.relative_attention_num_buckets
    max_distance = config.relative_attention_max_distance
    if "relative-positions" in config.reference_ops:
        key_positions = torch.arange(keys, device=table.device)
        distance = key_positions - key_positions[keys - queries :].unsqueeze(1)  # [q, k]
        buckets = distance_buckets(distance, num_buckets, max_distance, causal)
        return F.embedding(buckets, wide_table).to(table.dtype).permute(2, 0, 1).unsqueeze(0)
    # Look up all distances once, as one row. Each query's bias is a window of this row. For example, the last 2 of 3
    # positions have the row of distances [-2, -1, 0, 1]. The first query's window is [-1, 0, 1], the second one's
    # [-2, -1, 0]. unfold() returns windows from left to right, so the last query is first, and flip() reverses this.
    distance = torch.arange(1 - keys, queries, device=table.device)  # smallest: from the last query to the first key
    buckets = distance_buckets(distance, num_buckets, max_distance, causal)
    bias_by_distance = F.embedding(buckets, wide_table).t().contiguous()  # [n/t, q + k - 1]
    return bias_by_distance.unfold(1, keys, 1).flip(1).to(table.dtype).unsqueeze(0)
