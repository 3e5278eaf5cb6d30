"""Causal attention with context parallelism: this rank's two slices of a sequence attend to all earlier tokens.

All context ranks gather keys and values. With grouped heads, keys and values are a small part of a layer's activations,
so gathering costs little, and it works for any number of heads (Grattafiori et al. 2024).

Shapes: s whole sequence, c context ranks, b batch, g key-value heads of this rank, d width of a head, q queries
of a slice, k keys that these queries may see.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron import mpu

from .masks import Documents, cached_on
from .window_masks import causal_window


class ContextViews(NamedTuple):
    """Keys to which this rank's queries may attend: all earlier tokens, unless a window or documents hide some.

    ids: document number of each token of the sequence, int [b, s]. If `within_documents` is False, the numbers are
    ignored, and masks are created on the device of `ids`.
    within_documents: whether a query attends only to tokens of its own document.
    window: number of last tokens that a query sees, None for all.
    slices: begin and end of each slice of the sequence that this rank holds.
    """

    ids: Tensor
    within_documents: bool
    window: int | None
    slices: tuple[tuple[int, int], ...]
    axis: mpu.Axis

    @property
    def slice_length(self) -> int:
        """Number of tokens of a slice."""
        begin, end = self.slices[0]
        return end - begin

    @property
    def needs_mask(self) -> bool:
        """True if a window or documents hide some token before a query."""
        return self.within_documents or self.window is not None

    def key_range(self, slice_index: int) -> tuple[int, int]:
        """Return begin and end of the range of keys that at least one query of slice number `slice_index` may see."""
        begin, end = self.slices[slice_index]
        first_key = 0 if self.window is None else max(begin - self.window + 1, 0)
        return first_key, end

    def mask(self, slice_index: int) -> Tensor | None:
        """Return the mask of a slice, bool [1 or b, 1, q, k], or None if only later tokens are hidden.

        The mask covers the keys in the range `key_range(slice_index)` and is True where a query may attend to a key.
        Layers that receive the same ids share the mask.
        """
        if not self.needs_mask:
            return None
        key = "view", self.slices[slice_index], self.window, self.within_documents
        return cached_on(self.ids, key, lambda: self._build_mask(slice_index))

    def _build_mask(self, slice_index: int) -> Tensor:
        """Build the result of `mask`."""
        begin, end = self.slices[slice_index]
        first_key, _ = self.key_range(slice_index)
        # A window of `end` tokens hides only later tokens.
        window_mask = causal_window(end - begin, end - first_key, self.window or end, self.ids.device)
        if not self.within_documents:
            return window_mask
        is_same = self.ids[:, begin:end, None] == self.ids[:, None, first_key:end]
        return window_mask & is_same.unsqueeze(1)


def build_context_views(
    ids: Tensor, length: int, window: int | None, documents: Documents | None, axis: mpu.Axis
) -> ContextViews:
    """Return the keys to which this rank's queries may attend; a sequence of `length` tokens is sharded over `axis`.

    ids: document ids, [b, s] or empty. window: number of last tokens that a query sees, None for all.
    documents: built from `ids`; None if attention is not restricted to documents.
    """
    # A window as long as the sequence hides nothing, and without a window no mask is needed.
    if window is not None and window >= length:
        window = None
    slices = tuple(mpu.context_slices(length, axis))
    return ContextViews(ids, documents is not None, window, slices, axis)


def gather_keys_and_values(key: Tensor, value: Tensor, axis: mpu.Axis) -> tuple[Tensor, Tensor]:
    """All-gather keys and values, [b, g, s/c, d] -> [b, g, s, d] each, in token order.

    The backward pass reduce-scatters the gradients.
    """
    return _separate(mpu.gather_context(_concatenate(key, value), axis))


def gather_kv_without_grad(key: Tensor, value: Tensor, axis: mpu.Axis | None) -> tuple[Tensor, Tensor]:
    """All-gather keys and values, [b, g, s/c, d] -> [b, g, s, d] each, without gradients; no-op if axis is None."""
    return _separate(mpu.all_gather_context(_concatenate(key, value), axis)) if axis else (key, value)


def reduce_scatter_grads(key: Tensor, value: Tensor, axis: mpu.Axis | None) -> tuple[Tensor, Tensor]:
    """Sum gradients of all keys and values over the ranks, [b, g, s, d] -> [b, g, s/c, d] of this rank's tokens.

    A no-op if axis is None.
    """
    return _separate(mpu.reduce_scatter_context(_concatenate(key, value), axis)) if axis else (key, value)


def _concatenate(key: Tensor, value: Tensor) -> Tensor:
    """Concatenate keys and values, [b, g, s, d] each, to [s, b, g, 2 d], for a single collective."""
    return torch.cat([key, value], -1).permute(2, 0, 1, 3).contiguous()


def _separate(key_and_value: Tensor) -> tuple[Tensor, Tensor]:
    key, value = key_and_value.permute(1, 2, 0, 3).chunk(2, -1)
    return key, value
