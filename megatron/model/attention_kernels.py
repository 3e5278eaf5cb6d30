"""Attention calls, and torch's kernel, which computes most of them; special_kernels.py has the others.

Shapes: q queries, k keys, b batch, n query heads and g key-value heads of this rank, d width of a head.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron import mpu

from .heads import repeat_heads
from .masks import Documents, causal_mask, to_additive_mask

if TYPE_CHECKING:
    from .context_attention import ContextViews
    from .pieces import Pieces

Mask = Union[Documents, "ContextViews", Tensor, None]  # see `AttentionArgs`
Kernel = Callable[["AttentionArgs"], Tensor]  # function that computes a call -> [b, n, q, d]


class AttentionArgs(NamedTuple):
    """One attention call: query [b, n, q, d], key and value [b, g, k, d] -> [b, n, q, d].

    mask: `Documents` if tokens may attend only within their document; or a bool mask [1 or b, 1, q, k], True where a
    query may attend; or None. With context parallelism it is a `ContextViews`: `key` and `value` hold this rank's
    tokens only, but the mask covers the keys of all ranks.
    bias: tensor [1, n, q, k] to add to the scores, or None. p: dropout probability.
    causal: if there is no mask, a query sees the keys up to its own position. scale: factor of the scores.
    allow_per_document, allow_fused_bias: whether --reference-ops permits the kernels for documents and for a bias.
    may_copy_qkv: whether a kernel may copy queries, keys and values. This is False if the backward pass recomputes
    these tensors, because recomputation recognises them by their address.
    pieces: blocks of queries and keys to compute one by one, for documents or context-parallel slices, which `attend`
    finds; None if a mask is needed. Always None on accelerators and in compiled code.
    draw_index: number that distinguishes several dropout draws of one layer, see `mpu.Stream.drop`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask
    bias: Tensor | None
    p: float
    causal: bool
    scale: float
    stream: mpu.Stream
    allow_per_document: bool
    allow_fused_bias: bool
    may_copy_qkv: bool
    pieces: "Pieces | None" = None
    draw_index: int = 0

    @property
    def on_cpu(self) -> bool:
        """True on a CPU, for which torch has no kernel with dropout or with the gradient of a bias."""
        return self.query.device.type == "cpu"

    @property
    def views(self) -> "ContextViews | None":
        """The mask if it is a `ContextViews`, as with context parallelism, else None."""
        mask: Any = self.mask
        return mask if hasattr(mask, "slices") else None  # no isinstance(), which would import context_attention.py

    def visible(self) -> tuple[Tensor | None, bool]:
        """Return the bool mask [1 or b, 1, q, k] or None, and whether the kernel has to hide later keys (`is_causal`).

        Raises ValueError with context parallelism, where one rank has not all keys.
        """
        if self.views:
            raise ValueError(
                "a call with context parallelism has no mask of its own: see `views`, or leave it to `attend`"
            )
        mask: Any = self.mask.mask() if isinstance(self.mask, Documents) else self.mask
        if mask is not None:
            return mask, False  # a bool tensor by now; if later keys must be hidden, it hides them itself
        q = self.query.shape[2]
        k = self.key.shape[2]
        if q <= 1 or not self.causal:  # a single query, as in decoding, sees all keys
            return None, False
        # torch hides later keys without a mask only if there is no bias and q = k; our dropout on a CPU needs a mask.
        if self.bias is not None or q != k or (self.p > 0 and self.on_cpu):
            return causal_mask(q, k, self.query.device), False
        return None, True

    def added(self) -> tuple[Tensor | None, bool]:
        """Return mask plus bias [1 or b, 1 or n, q, k], or None, and whether the kernel must also hide later keys."""
        mask, is_causal = self.visible()
        if mask is None:
            return self.bias, is_causal
        if self.bias is None:
            return to_additive_mask(mask, self.query.dtype), is_causal
        return self.bias.masked_fill(~mask, -torch.inf), is_causal


def torch_sdpa(call: AttentionArgs) -> Tensor:
    """Call torch's scaled_dot_product_attention, which chooses the kernel -> [b, n, q, d]."""
    mask, is_causal = call.added()
    query = call.query
    key = call.key
    value = call.value
    grouped = key.shape[1] < query.shape[1]  # several query heads share a key-value head
    # torch's CUDA kernels for grouped heads support neither masks nor fp32.
    needs_repeated_heads = mask is not None or query.dtype == torch.float32
    if grouped and needs_repeated_heads and query.device.type == "cuda":
        key, value = repeat_heads(query, key, value)
        grouped = False
    options: dict[str, Any] = {"attn_mask": mask, "dropout_p": call.p, "is_causal": is_causal, "scale": call.scale}
    with select_sdpa_kernels(query, mask):
        return F.scaled_dot_product_attention(query, key, value, **options, enable_gqa=grouped)


def select_sdpa_kernels(query: Tensor, mask: Tensor | None) -> AbstractContextManager[None]:
    """Return a context that selects torch's attention kernels for query [b, n, q, d].

    With a mask on CUDA it excludes cuDNN's kernel. torch prefers that kernel on Hopper, but with a mask some of
    its gradients are NaN or Inf for some lengths.
    """
    if mask is None or query.device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def choose_kernel(call: AttentionArgs) -> Kernel:
    """Return the kernel of the call: torch's, unless documents, a bias, dropout or another part needs another."""
    # Most calls need none of the special kernels, whose module is imported only if one may be needed.
    may_need_special = isinstance(call.mask, Documents) or call.views or call.bias is not None
    may_need_cpu_kernel = call.on_cpu and (call.p or call.query.dtype != torch.float32)  # some CPUs emulate 16 bits
    if not (may_need_special or may_need_cpu_kernel):
        return torch_sdpa
    from .special_kernels import KERNELS

    return next(kernel for condition, kernel in KERNELS if condition(call))  # the last condition is always true


def attend(call: AttentionArgs) -> Tensor:
    """Compute the call by the kernel that `choose_kernel` returns -> [b, n, q, d].

    Documents may be computed in pieces (blocks) on a CPU. Raises ValueError if a token has no document id.
    """
    if isinstance(call.mask, Documents):
        call.mask.check_token_counts(call.query, call.key)
    if call.allow_per_document and (isinstance(call.mask, Documents) or call.views):
        from .pieces import pieces_for

        call = call._replace(pieces=pieces_for(call.query, call.mask))  # type: ignore[arg-type]
    return choose_kernel(call)(call)
