"""Whose memory a tensor lies in: buffers that are used again, and tensors that share memory without knowing each other.

A message is one buffer, so its tensors are neighbours in memory. Layers may work in place on what
they are given, keep their outputs, or fill the same output again for the next micro-batch; none of
this may reach another tensor, another micro-batch or the user's data set.
"""

from typing import Any

import torch
from torch import Tensor

from ._torch import users


def plain(tensor: Tensor) -> Tensor:
    """The tensor as its memory has it: a conjugate or negative view is computed, since the bit that says so is no part of it."""
    return tensor.detach().resolve_conj().resolve_neg()


def alias(tensor: Tensor) -> Tensor:
    """The same memory as a tensor without history: no base, no gradient, a version counter of its own."""
    bare = plain(tensor)
    return bare.new_empty(0).set_(
        bare.untyped_storage(),  # type: ignore[call-overload]
        bare.storage_offset(),
        bare.size(),
        bare.stride(),
    )


class _Handed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:  # type: ignore[override]
        return alias(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def handed(tensor: Tensor) -> Tensor:
    """What a layer is given of a leaf: no leaf itself, so the layer may work in place on it, and nothing is copied.

    Like `tensor.clone()`, but in the memory of `tensor`, whose values are lost to such a layer.
    """
    return _Handed.apply(tensor) if tensor.requires_grad else alias(tensor)  # type: ignore[no-any-return,no-untyped-call]


def given_up_grad(tensor: Tensor) -> Tensor:
    """The gradient of a tensor, which forgets it: nobody else looks at it, so it needs no copy to be sent."""
    grad, tensor.grad = tensor.grad, None
    return torch.zeros_like(tensor) if grad is None else plain(grad)


class Pool:
    """Buffers by size, handed out again only when no tensor looks into them any more.

    A received tensor may live on in autograd's graph, in another message or in a user's
    variable, so nobody gives a buffer back: torch's count of a storage's users tells.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[int, list[Tensor]] = {}
        self._wanted: set[int] = set()

    def take(self, size: int) -> Tensor:
        """`size` bytes, as a uint8 tensor."""
        self._wanted.add(size)
        buffers = self._buffers.setdefault(size, [])
        for buffer in buffers:
            if users(buffer) == 1:
                return buffer.view(-1)
        buffers.append(torch.empty(size, dtype=torch.uint8, device=self._device))
        return buffers[-1].view(-1)

    def trim(self) -> None:
        """Forget the sizes that nobody has asked for since the last call."""
        self._buffers = {size: buffers for size, buffers in self._buffers.items() if size in self._wanted}
        self._wanted.clear()
