"""Checks of a batch before its broadcast, and broadcast of its shapes if the other ranks do not know them."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .mesh import Axis

MAX_DIMS = 8


def find_problem(
    keys: Sequence[str],
    data: Mapping[str, Tensor] | None,
    datatype: torch.dtype,
    sizes: Mapping[str, Sequence[int]] | None,
) -> str:
    """Return why `mpu.broadcast_data` cannot send this data, tensors [...] by key; "" if it can."""
    if data is None:
        return "broadcast_data: the first rank of a model-parallel group must be given data, got None"
    if not isinstance(data, Mapping):
        return f"broadcast_data: the data is a {type(data).__name__}, expected a dict with {', '.join(keys)}"
    for key in keys:
        if key not in data:
            return f"broadcast_data: no {key!r} in the data, which has {', '.join(map(str, data)) or 'nothing'}"
        tensor = data[key]
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            return f"broadcast_data: {key!r} is a {kind}, expected a tensor; return tensors from dataset[n]"
        if tensor.dtype != datatype:
            return f"broadcast_data: {key!r} is {tensor.dtype}, expected {datatype}"
        if tensor.dim() > MAX_DIMS:
            return f"broadcast_data: {key!r} has {tensor.dim()} dimensions, at most {MAX_DIMS} are supported"
        if sizes is not None and tensor.shape != torch.Size(sizes[key]):
            return f"broadcast_data: {key!r} is {list(tensor.shape)}, expected {list(sizes[key])}"
    return ""


def broadcast_shapes(
    keys: Sequence[str], data: Mapping[str, Tensor] | None, device: torch.device, axis: Axis, message: str
) -> list[torch.Size]:
    """Return the shapes [...] of the first rank's tensors on every rank of `axis`.

    data: valid data on the first rank, else None. Raises ValueError(message) on all ranks if the first rank has none.
    """
    # Row 0 is 1 if the data is valid. Every other row has the number of dimensions of a tensor, then its shape.
    header = torch.full((1 + len(keys), 1 + MAX_DIMS), -1, dtype=torch.int64)
    if data is not None:
        header[0] = 1
        for row, key in zip(header[1:], keys, strict=True):  # `row` is a view, so this fills the header
            shape = data[key].shape
            row[: 1 + len(shape)] = torch.tensor([len(shape), *shape])
    header = header.to(device)
    dist.broadcast(header, axis.first, group=axis.group)
    validity, *rows = header.tolist()
    if validity[0] != 1:
        raise ValueError(message)
    return [torch.Size(sizes[:num_dims]) for num_dims, *sizes in rows]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor [...] on `device`. Copies from the host are queued, so the host waits for no earlier work."""
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
