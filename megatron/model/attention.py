"""Multi-head self-attention with its heads split over the model-parallel ranks.

Shapes: s sequence, b batch, h hidden, n heads, d width of a head, t model-parallel ranks.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron import mpu
from megatron.config import ModelConfig


def document_mask(document_ids: Tensor) -> Tensor:
    """[b, s] number of the document each token is in -> [b, 1, s, s], True where a token may look.

    A token sees itself and what precedes it in its own document.
    """
    same = document_ids.unsqueeze(2) == document_ids.unsqueeze(1)
    return same.tril().unsqueeze(1)


class SelfAttention(nn.Module):
    """Causal attention: every token looks at itself and at what precedes it (Vaswani et al. 2017).

    The rows of the fused projection stand head by head, (query, key, value) of head 0 first, so
    that a contiguous cut gives each rank whole heads.
    """

    def __init__(self, config: ModelConfig, name: str, output_std: float) -> None:
        super().__init__()
        self.axis = mpu.get_mesh().model
        self.heads = config.num_attention_heads // self.axis.size
        self.head_size = config.head_size
        self.dropout, self.rng, self.stream = config.attention_dropout, mpu.get_mesh().rng, f"{name}.attention"
        inner = config.num_attention_heads * config.head_size
        self.query_key_value = mpu.ColumnParallelLinear(
            config.hidden_size,
            3 * inner,
            bias=config.hidden_bias,
            gather_output=False,
            init_std=config.init_method_std,
        )
        self.dense = mpu.RowParallelLinear(
            inner,
            config.hidden_size,
            bias=config.hidden_bias,
            input_is_parallel=True,
            skip_bias_add=True,
            init_std=output_std,
        )

    def forward(self, hidden: Tensor, document_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """[s, b, h] -> ([s, b, h], its bias still to be added).

        document_ids: [b, s] to keep documents apart, or empty for plain causal attention.
        """
        s, b, _ = hidden.shape
        qkv, _ = self.query_key_value(hidden)  # [s, b, n/t * 3 * d]
        qkv = qkv.view(s, b, self.heads, 3, self.head_size)
        query, key, value = qkv.permute(3, 1, 2, 0, 4)  # 3 x [b, n/t, s, d]
        mask = document_mask(document_ids) if document_ids.numel() else None
        p = self.dropout if self.training else 0.0
        if p:
            with self.rng.fork(self.stream, hidden.device, split=True):
                context = self._attend(query, key, value, mask, p)
        else:
            context = self._attend(query, key, value, mask, p)
        context = context.permute(2, 0, 1, 3).reshape(s, b, self.heads * self.head_size)
        return self.dense(context)  # type: ignore[no-any-return]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, p: float) -> Tensor:
        """[b, n/t, s, d] each -> [b, n/t, s, d]; without a mask no s x s tensor is made."""
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=p, is_causal=mask is None, scale=1 / math.sqrt(self.head_size)
        )


def no_documents(device: torch.device) -> Tensor:
    """The document ids of plain causal attention: an empty tensor, which costs nothing to send."""
    return torch.empty(0, dtype=torch.int32, device=device)
