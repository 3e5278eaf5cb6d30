"""Weights whose memory layout DeepSpeed's broadcasts or torch's fused optimizers do not accept.

DeepSpeed 0.19.8 broadcasts the bytes of a weight, `p.data.view(torch.uint8)`. This view fails for a weight of
dimension 0 and for a weight whose last stride is not 1, such as a transposed or a channels_last weight.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def _can_broadcast(data: Tensor) -> bool:
    """Return whether DeepSpeed's broadcast accepts the memory layout of a weight."""
    return data.dim() > 0 and data.is_contiguous() and data.stride(-1) == 1


@contextmanager
def flattened_for_broadcast(module: nn.Module) -> Iterator[None]:
    """Replace the data of weights that cannot be broadcast by flat views or copies in this block."""
    replaced = []
    for p in module.parameters():
        data = p.data
        if not _can_broadcast(data):
            replaced.append((p, data))
            p.data = data.contiguous().view(-1)  # a copy, if `data` is not contiguous
    yield
    for p, data in replaced:
        if p.data.data_ptr() != data.data_ptr():  # only the copy has received the broadcast values
            data.copy_(p.data.view(data.shape))
        p.data = data


@contextmanager
def flattened_scalars(module: nn.Module) -> Iterator[None]:
    """Give weights of dimension 0 and their gradients one dimension in this block, which may change the gradients.

    DeepSpeed clips by a factor of shape [1], by which it cannot multiply a gradient of dimension 0 in place.
    """
    replaced = []
    for p in module.parameters():
        if not p.dim() and p.grad is not None:
            replaced.append((p, p.data, p.grad))
            _set_data_and_grad(p, p.data.view(1), p.grad.view(1))
    yield
    for p, data, gradient in replaced:
        _set_data_and_grad(p, data, gradient)


def _set_data_and_grad(p: nn.Parameter, data: Tensor, gradient: Tensor) -> None:
    """Replace the data and the gradient of `p` by tensors of another shape."""
    p.grad = None  # torch compares the shapes of a weight and its gradient
    p.data = data
    p.grad = gradient


def close_gaps(module: nn.Module) -> None:
    """Copy each weight that is not contiguous, such as a transposed one, or some columns of a larger tensor.

    torch's fused optimizers (2.13 and 2.15 on CPUs) ignore strides. They would also step elements between the columns,
    and pair elements of a transposed weight with others of its gradient, which is contiguous after a reduction.
    """
    for p in module.parameters():
        if not p.is_contiguous():
            p.data = p.data.contiguous()


def make_rows_contiguous(module: nn.Module) -> None:
    """Give the weights of `module` contiguous memory, for ZeRO 3, which shards each weight as a flat tensor.

    Raises ValueError for a weight of dimension 0, which ZeRO 3 cannot shard.
    """
    for name, p in module.named_parameters():
        if hasattr(p, "ds_id"):  # sharded already
            continue
        if not p.dim():
            raise ValueError(
                f"ZeRO 3 cannot shard the weight {name}, a single number without dimensions: give it one dimension, as "
                "in torch.ones(1), or use ZeRO 0, 1 or 2"
            )
        if not _can_broadcast(p.data):
            p.data = p.data.clone(memory_format=torch.contiguous_format)
