"""Choice of the kernel that computes an attention call, by its mask, bias, dropout and device.

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

Mask = Union[Documents, "Views", Tensor, None]  # see `Call`


class Call(NamedTuple):
    """One attention call: query [b, n, q, d], key and value [b, g, k, d] -> [b, n, q, d].

    mask: `Documents` if tokens may attend only within their document; or a bool mask [1 or b, 1, q, k], True where a
    query may attend; or None. With context parallelism it is a `Views`: `key` and `value` hold this rank's tokens only,
    but the mask covers the keys of all ranks.
    bias: tensor [1, n, q, k] to add to the scores, or None. p: dropout probability.
    causal: if there is no mask, a query sees the keys up to its own position. scale: factor of the scores.
    by_document, fused_bias: whether --reference-ops permits the kernels for documents and for a bias.
    packs: whether a kernel may copy queries, keys and values. This is False if the backward pass recomputes these
    tensors, because recomputation recognises them by their address.
    pieces: blocks of queries and keys to compute one by one, for documents or context-parallel slices; None if a mask
    is needed. Always None on accelerators and in compiled code.
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
        """Return the bool mask [1 or b, 1, q, k] or None, and whether the kernel has to hide later keys itself."""
        mask: Any = self.mask.mask() if isinstance(self.mask, Documents) else self.mask
        q = self.query.shape[2]
        k = self.key.shape[2]
        # A mask built from documents already hides later keys if attention is causal. A single query, as in decoding,
        # sees all keys.
        hides = self.causal and mask is None and q > 1
        if hides and (self.bias is not None or q != k or (self.p > 0 and self.on_cpu)):
            return causal_mask(q, k, self.query.device), False
        return mask, hides

    def added(self) -> tuple[Tensor | None, bool]:
        """Return the tensor to add to scores, [1 or b, 1 or n, q, k] or None, and if the kernel hides later keys."""
        mask, hides = self.visible()
        if self.bias is not None:
            return self.bias if mask is None else self.bias.masked_fill(~mask, -torch.inf), hides
        return None if mask is None else added_mask(mask, self.query.dtype), hides


def flash_in_pieces(c: Call) -> Tensor:
    """Run torch's flash attention for CPUs on one block of queries and keys after another -> [b, n, q, d]."""
    from .flash_attention import flash_attention

    assert c.pieces is not None
    axis = c.views.axis if c.views else None
    return flash_attention(c.query, c.key, c.value, c.pieces, c.scale, axis)


def slice_by_slice(c: Call) -> Tensor:
    """Attend from each slice of this context rank to the gathered keys -> [b, n, q, d]."""
    from .context_attention import gather_keys_and_values

    views = c.views
    assert views is not None
    found = []
    key, value = gather_keys_and_values(c.key, c.value, views.axis)
    for at, own in enumerate(torch.split(c.query, views.each, 2)):
        begin, end = views.keys(at)
        keys = key[:, :, begin:end]
        values = value[:, :, begin:end]
        if views.masked or c.p or c.on_cpu or torch.compiler.is_compiling():
            found.append(attend(c._replace(query=own, key=keys, value=values, mask=views.mask(at), turn=at)))
        else:  # torch's `causal_lower_right` needs no mask tensor
            from torch.nn.attention.bias import causal_lower_right  # imported late, because it loads torch.compile

            keys, values = repeat_heads(own, keys, values)
            last: Any = causal_lower_right(own.shape[2], end)
            found.append(F.scaled_dot_product_attention(own, keys, values, attn_mask=last, scale=c.scale))
    return torch.cat(found, 2)


def biased(c: Call) -> Tensor:
    """Attend with a learned bias, recomputing the probabilities in the backward pass -> [b, n, q, d]."""
    from .biased_attention import biased_attention

    assert c.bias is not None
    sees = c.visible()[0] if c.pieces is None else c.pieces
    return biased_attention(c.query, c.key, c.value, c.bias, sees, c.scale)


def dropout_in_pieces(c: Call) -> Tensor:
    """Attend with dropout document by document -> [b, n, q, d]."""
    from .attention_dropout import by_document

    assert c.pieces is not None
    return by_document(c.query, c.key, c.value, c.pieces, c.scale, c.p, c.stream)


def dropout(c: Call) -> Tensor:
    """Attend with dropout by torch's matmul, softmax and dropout operations -> [b, n, q, d]."""
    from .attention_dropout import attention_with_dropout

    added, _ = c.added()
    return attention_with_dropout(c.query, c.key, c.value, added, c.scale, c.p, c.stream, c.turn)


def packed(c: Call) -> Tensor:
    """Run torch's kernel for packed documents on CUDA -> [b, n, q, d]."""
    from .packed_attention import packed_attention

    assert isinstance(c.mask, Documents)
    return packed_attention(c.query, c.key, c.value, c.mask, c.scale)


def torchs(c: Call) -> Tensor:
    """Call torch's scaled_dot_product_attention, which chooses the kernel -> [b, n, q, d]."""
    added, hides = c.added()
    query = c.query
    key = c.key
    value = c.value
    grouped = key.shape[1] < query.shape[1]
    if grouped and query.device.type == "cuda" and (added is not None or query.dtype == torch.float32):
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


def _packs(c: Call) -> bool:
    if not (c.by_document and c.packs and isinstance(c.mask, Documents)):
        return False
    from .packed_attention import serves

    return serves(c.query, c.mask)


def _differentiates_bias(c: Call) -> bool:
    if not c.fused_bias or c.bias is None:
        return False
    from .biased_attention import serves

    return serves(c.query, c.bias)


Kernel = Callable[[Call], Tensor]
# (condition, kernel): the first kernel whose condition holds computes the call. The mask is a `Views` only with context
# parallelism, which does not support a bias.
KERNELS: tuple[tuple[Callable[[Call], Any], Kernel], ...] = (
    (lambda c: c.pieces and not c.p and c.bias is None, flash_in_pieces),
    (lambda c: c.views, slice_by_slice),
    (lambda c: c.pieces and not c.p and c.fused_bias, biased),
    (lambda c: c.pieces and c.pieces.once and c.bias is None, dropout_in_pieces),
    (lambda c: not c.p and c.bias is None and _packs(c), packed),
    (lambda c: not c.p and _differentiates_bias(c), biased),
    (lambda c: c.p and c.on_cpu, dropout),
    (lambda c: True, torchs),
)
TAKE_GROUPED_HEADS = flash_in_pieces, slice_by_slice, torchs


def choose_kernel(c: Call) -> Kernel:
    """Return the first kernel of KERNELS whose condition holds for the call."""
    for serves, kernel in KERNELS:
        if serves(c):
            return kernel
    raise AssertionError("the last kernel of KERNELS must accept every call")


def attend(c: Call) -> Tensor:
    """Compute the call by the first kernel of KERNELS whose condition holds -> [b, n, q, d].

    Raises ValueError if a token has no document id.
    """
    if isinstance(c.mask, Documents):
        c.mask.refuse_others(c.query, c.key)
    if c.by_document and (isinstance(c.mask, Documents) or c.views):
        from .pieces import pieces_for

        c = c._replace(pieces=pieces_for(c.query, c.mask))  # type: ignore[arg-type]
    kernel = choose_kernel(c)
    if kernel not in TAKE_GROUPED_HEADS:
        key, value = repeat_heads(c.query, c.key, c.value)
        c = c._replace(key=key, value=value)
    return kernel(c)
