"""One rank of each model-parallel line reads data; the others get it from there in one message."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .mesh import Axis, current

MAX_DIMS = 8


def broadcast_data(
    keys: Sequence[str],
    data: Mapping[str, Tensor] | None,
    datatype: torch.dtype,
    *,
    device: torch.device | str | None = None,
    axis: Axis | None = None,
) -> dict[str, Tensor]:
    """`data[key]` of the first rank of the line, for every key, on every rank of the line.

    data: tensors of `datatype` with at most 8 dimensions; only looked at on the first rank,
    None elsewhere. Sizes need not be known beforehand nor be equal.
    Raises ValueError for a missing key or another dtype, on every rank.
    """
    axis = axis or current().model
    device = torch.device(device) if device is not None else default_device(axis)
    if axis.size == 1:
        problem = _problem(keys, data, datatype)
        if problem or data is None:
            raise ValueError(problem)
        return {key: data[key].to(device) for key in keys}

    source = axis.rank == 0
    problem = _problem(keys, data, datatype) if source else ""
    header = torch.full((1 + len(keys) * (MAX_DIMS + 1),), -1, dtype=torch.int64)
    if source and not problem and data is not None:
        header[0] = 1
        for at, key in enumerate(keys):
            shape = data[key].shape
            row = header[1 + at * (MAX_DIMS + 1) :]
            row[0] = len(shape)
            row[1 : 1 + len(shape)] = torch.tensor(shape)
    header = header.to(device)
    dist.broadcast(header, axis.first, group=axis.group)
    numbers = header.tolist()
    if numbers[0] != 1:
        raise ValueError(problem or f"broadcast_data: rank {axis.first} has no valid data for {', '.join(keys)}")
    rows = [numbers[1 + at * (MAX_DIMS + 1) :] for at in range(len(keys))]
    shapes = [torch.Size(row[1 : 1 + row[0]]) for row in rows]

    if source and data is not None:
        flat = torch.cat([data[key].reshape(-1).to(device) for key in keys])
    else:
        flat = torch.empty(sum(shape.numel() for shape in shapes), dtype=datatype, device=device)
    dist.broadcast(flat, axis.first, group=axis.group)
    parts = torch.split(flat, [shape.numel() for shape in shapes])
    return {key: part.view(shape) for key, part, shape in zip(keys, parts, shapes, strict=True)}


def _problem(keys: Sequence[str], data: Mapping[str, Tensor] | None, datatype: torch.dtype) -> str:
    if data is None:
        return "broadcast_data: the first rank of a model-parallel group must be given data, got None"
    for key in keys:
        if key not in data:
            return f"broadcast_data: no {key!r} in the data, which has {', '.join(map(str, data)) or 'nothing'}"
        if data[key].dtype != datatype:
            return f"broadcast_data: {key!r} is {data[key].dtype}, expected {datatype}"
        if data[key].dim() > MAX_DIMS:
            return f"broadcast_data: {key!r} has {data[key].dim()} dimensions, at most {MAX_DIMS} are supported"
    return ""


def default_device(axis: Axis) -> torch.device:
    """Where the ranks of a line compute: on the CPU if they talk over gloo or there is nothing else."""
    if axis.group is not None and dist.get_backend(axis.group) == "gloo":
        return torch.device("cpu")
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
