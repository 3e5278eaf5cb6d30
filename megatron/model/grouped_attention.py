"""Self-attention with key-value heads that query heads share, with rotary positions, or with normalised heads.

Shapes: s sequence, b batch, n query heads and g key-value heads, t model-parallel ranks, d width of a head.
"""

import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.config import ModelConfig

from .attention import SelfAttention
from .block import norm_of_size
from .grouped_heads import gather_shared_group, split_grouped_heads, view_by_group
from .rotary import Rotation


def build_head_norm(config: ModelConfig) -> nn.Module:
    """Build an RMS norm over the features of one head, with one weight for all heads, replicated on every rank.

    Its gradients are summed over the model-parallel ranks, which hold different heads.
    """
    return norm_of_size(config, config.head_size, rms=True, sequence=mpu.get_mesh().model)


class GroupedSelfAttention(SelfAttention):
    """Self-attention of grouped heads (Ainslie et al. 2023); `grouped_heads.py` describes the order of the rows.

    query_norm, key_norm: norms of each head (--qk-norm), or None.
    """

    def __init__(self, config: ModelConfig, name: str, output_std: float, causal: bool) -> None:
        super().__init__(config, name, output_std, causal)
        # 8 ranks and 2 key-value heads: 4 neighbouring ranks share a head.
        self.sharing_ranks = mpu.neighbours(self.axis, max(self.axis.size // config.key_value_heads, 1))
        self.query_norm = build_head_norm(config) if config.qk_norm else None
        self.key_norm = build_head_norm(config) if config.qk_norm else None
        self.unfused_split = "rope" in config.reference_ops

    def split_qkv(self, qkv: Tensor, angles: Rotation | None) -> tuple[Tensor, ...]:
        """Split [s, b, (n/t + 2 g) * d] into queries [b, n/t, s, d] and keys and values [b, g, s, d] in one buffer."""
        size = self.head_size
        groups = self.kv_heads  # g, which is 1 if several ranks share a group
        if self.sharing_ranks.size > 1:  # then this rank has projected only its share of the group's rows
            qkv = gather_shared_group(qkv, size, self.sharing_ranks)
        if self.query_norm is not None and self.key_norm is not None:  # with --qk-norm; else both are None
            heads = view_by_group(qkv, groups, size)  # [s, b, g, queries + key + value, d]
            queries = self.query_norm(heads[..., :-2, :])
            keys = self.key_norm(heads[..., -2:-1, :])
            values = heads[..., -1:, :]
            qkv = torch.cat([queries, keys, values], 3).flatten(2)  # shape and order of rows are as before
        parts = (self.heads // groups, 1, 1)  # heads in a group: its queries, a key and a value
        return split_grouped_heads(qkv, groups, size, parts, angles, unfused=self.unfused_split)
