"""Memory of tensors: reusable buffers, and tensors that share memory without autograd's knowledge.

A message is one buffer, so its tensors are neighbours in memory. Layers may modify their inputs in place, keep
their outputs, or reuse one output tensor for every micro-batch. None of this may affect another tensor, another
micro-batch or the user's data set.
"""

from typing import Any

import torch
from torch import Tensor

from ._torch import storage_use_count


def detach_and_resolve(tensor: Tensor) -> Tensor:
    """Return a detached tensor of the same values with its conjugate or negative bit resolved.

    torch keeps such a bit outside the tensor's memory, so it would be lost in a message.
    """
    return tensor.detach().resolve_conj().resolve_neg()


def alias(tensor: Tensor) -> Tensor:
    """Return a tensor of the same memory and shape that autograd does not connect to `tensor`.

    The result has no autograd history, base or gradient, and has its own version counter.
    """
    detached = detach_and_resolve(tensor)
    # A view would share the version counter; a new tensor that is set to the same memory has a counter of its own.
    return detached.new_empty(0).set_(
        detached.untyped_storage(),  # type: ignore[call-overload]
        detached.storage_offset(),
        detached.size(),
        detached.stride(),
    )


def same_storage(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors view the same memory."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


class _NonLeafView(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:  # type: ignore[override]
        return alias(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def non_leaf_view(tensor: Tensor) -> Tensor:
    """Return a non-leaf tensor that shares the memory of the leaf `tensor`, so a layer may modify it in place.

    It acts like `tensor.clone()`, but copies nothing, so an in-place layer overwrites the values of `tensor`.
    """
    return _NonLeafView.apply(tensor) if tensor.requires_grad else alias(tensor)  # type: ignore[no-any-return,no-untyped-call]


def pop_grad(tensor: Tensor) -> Tensor:
    """Return the gradient of `tensor`, not a copy, or zeros if there is none; set `tensor.grad` to None."""
    grad = tensor.grad
    tensor.grad = None
    return torch.zeros_like(tensor) if grad is None else detach_and_resolve(grad)


class BufferPool:
    """Pool of message buffers by size; a buffer is reused only when no tensor views it any more.

    Autograd's graph, another message or a user's variable may keep a received tensor. So callers do not return
    buffers; torch's use count of a storage shows when a buffer is free.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[int, list[Tensor]] = {}
        self._requested_sizes: set[int] = set()

    def take(self, size: int) -> Tensor:
        """Return a free uint8 buffer `[size]`."""
        self._requested_sizes.add(size)
        buffers = self._buffers.setdefault(size, [])
        for buffer in buffers:
            if storage_use_count(buffer) == 1:  # the only user is this pool
                return buffer.view(-1)  # a view counts as a user, until the caller and autograd drop it
        buffers.append(torch.empty(size, dtype=torch.uint8, device=self._device))
        return buffers[-1].view(-1)

    def trim(self) -> None:
        """Free the buffers of all sizes that were not requested since the last call."""
        for size in self._buffers.keys() - self._requested_sizes:
            del self._buffers[size]
        self._requested_sizes.clear()
