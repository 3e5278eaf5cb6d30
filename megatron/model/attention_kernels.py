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
from .masks import Documents, added_mask, causal_mask

if TYPE_CHECKING:
    from .context_attention import Views
    from .pieces import Pieces

Mask = Union[Documents, "Views", Tensor, None]  # see `AttentionArgs`
Kernel = Callable[["AttentionArgs"], Tensor]  # function that computes a call -> [b, n, q, d]


class AttentionArgs(NamedTuple):
    """One attention call: query [b, n, q, d], key and value [b, g, k, d] -> [b, n, q, d].

    mask: `Documents` if tokens may attend only within their document; or a bool mask [1 or b, 1, q, k], True where a
    query may attend; or None. With context parallelism it is a `Views`: `key` and `value` hold this rank's tokens only,
    but the mask covers the keys of all ranks.
    bias: tensor [1, n, q, k] to add to the scores, or None. p: dropout probability.
    causal: if there is no mask, a query sees the keys up to its own position. scale: factor of the scores.
    by_document, fused_bias: whether --reference-ops permits the kernels for documents and for a bias.
    packs: whether a kernel may copy queries, keys and values. This is False if the backward pass recomputes these
    tensors, because recomputation recognises them by their address.
    pieces: blocks of queries and keys to compute one by one, for documents or context-parallel slices, which `attend`
    finds; None if a mask is needed. Always None on accelerators and in compiled code.
    turn: number that distinguishes several dropout draws of one layer, see `mpu.Stream.drop`.
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
    by_document: bool
    fused_bias: bool
    packs: bool
    pieces: "Pieces | None" = None
    turn: int = 0

    @property
    def on_cpu(self) -> bool:
        """True on a CPU, for which torch has no kernel with dropout or with the gradient of a bias."""
        return self.query.device.type == "cpu"

    @property
    def views(self) -> "Views | None":
        """The mask if it is a `Views`, as with context parallelism, else None."""
        mask: Any = self.mask
        return mask if hasattr(mask, "slices") else None

    def visible(self) -> tuple[Tensor | None, bool]:
        """Return the bool mask [1 or b, 1, q, k] or None, and whether the kernel has to hide later keys itself.

        Raises ValueError with context parallelism, where one rank has not all keys.
        """
        if self.views:
            raise ValueError(
                "a call with context parallelism has no mask of its own: see `views`, or leave it to `attend`"
            )
        mask: Any = self.mask.mask() if isinstance(self.mask, Documents) else self.mask
        q = self.query.shape[2]
        k = self.key.shape[2]
        # A mask built from documents already hides later keys if attention is causal. A single query, as in decoding,
        # sees all keys.
        hides = self.causal and mask is None and q > 1
        needs_mask = self.bias is not None or q != k or (self.p > 0 and self.on_cpu)
        if hides and needs_mask:
            return causal_mask(q, k, self.query.device), False
        return mask, hides

    def added(self) -> tuple[Tensor | None, bool]:
        """Return the tensor to add to scores, [1 or b, 1 or n, q, k] or None, and if the kernel hides later keys."""
        mask, hides = self.visible()
        if mask is None:
            return self.bias, hides
        if self.bias is None:
            return added_mask(mask, self.query.dtype), hides
        return self.bias.masked_fill(~mask, -torch.inf), hides


def torchs(c: AttentionArgs) -> Tensor:
    """Call torch's scaled_dot_product_attention, which chooses the kernel -> [b, n, q, d]."""
    added, hides = c.added()
    query = c.query
    key = c.key
    value = c.value
    grouped = key.shape[1] < query.shape[1]
    unsupported = added is not None or query.dtype == torch.float32
    if grouped and unsupported and query.device.type == "cuda":
        # torch's CUDA kernels for grouped heads support neither masks nor fp32.
        key, value = repeat_heads(query, key, value)
        grouped = False
    options: dict[str, Any] = {"attn_mask": added, "dropout_p": c.p, "is_causal": hides, "scale": c.scale}
    with kernels_for(query, added):
        return F.scaled_dot_product_attention(query, key, value, **options, enable_gqa=grouped)


def kernels_for(query: Tensor, mask: Tensor | None) -> AbstractContextManager[None]:
    """Return a context that selects torch's attention kernels for query [b, n, q, d].

    With a mask on CUDA it excludes cuDNN's kernel. torch prefers that kernel on Hopper, but with a mask some of
    its gradients are NaN or Inf for some lengths.
    """
    if mask is None or query.device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def choose_kernel(c: AttentionArgs) -> Kernel:
    """Return the kernel of the call: torch's, unless documents, a bias, dropout or another part needs another."""
    special = isinstance(c.mask, Documents) or c.views or c.bias is not None
    on_cpu = c.on_cpu and (c.p or c.query.dtype != torch.float32)
    if not special and not on_cpu:
        return torchs
    from .special_kernels import choose_special_kernel

    return choose_special_kernel(c)


def attend(c: AttentionArgs) -> Tensor:
    """Compute the call by the kernel that `choose_kernel` returns -> [b, n, q, d].

    Raises ValueError if a token has no document id.
    """
    if isinstance(c.mask, Documents):
        c.mask.refuse_others(c.query, c.key)
    if c.by_document and (isinstance(c.mask, Documents) or c.views):
        from .pieces import pieces_for

        c = c._replace(pieces=pieces_for(c.query, c.mask))  # type: ignore[arg-type]
    return choose_kernel(c)(c)
