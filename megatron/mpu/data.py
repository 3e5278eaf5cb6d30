"""Data broadcast: the first rank of each model-parallel group reads data and sends it in one message."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .current import current_mesh
from .data_shapes import broadcast_shapes, find_problem, to_device
from .mesh import Axis


def broadcast_data(
    keys: Sequence[str],
    data: Mapping[str, Tensor] | None,
    datatype: torch.dtype,
    *,
    sizes: Mapping[str, Sequence[int]] | None = None,
    device: torch.device | str | None = None,
    axis: Axis | None = None,
) -> dict[str, Tensor]:
    """Return `data[key]` of the group's first rank, for every key, on every rank of the group.

    data: on the first rank, tensors of `datatype` with at most 8 dimensions; ignored on the other ranks, may be None.
    sizes: the shape of each tensor, if all ranks know them. By default shapes are sent first, and ranks on an
    accelerator must wait for these shapes.
    Raises ValueError on every rank for a missing key, a wrong dtype or a wrong size. With `sizes` on an
    accelerator only the first rank raises, because a check on the other ranks would synchronise with the device.
    """
    axis = axis or current_mesh().model
    device = default_device(axis) if device is None else torch.device(device)
    if axis.size == 1:
        problem = find_problem(keys, data, datatype, None)  # nothing is sent, so any sizes are accepted
        if problem or data is None:  # None is a problem, too, as the type checker cannot know
            raise ValueError(problem)
        return {key: to_device(data[key], device) for key in keys}

    problem = ""
    valid_data = None
    if axis.rank == 0:
        problem = find_problem(keys, data, datatype, sizes)
        valid_data = None if problem else data
    # The other ranks know only that the first rank of the group has a problem.
    message = problem or f"broadcast_data: rank {axis.first} has no valid data for {', '.join(keys)}"
    if sizes:
        shapes = [torch.Size(sizes[key]) for key in keys]
    else:
        shapes = broadcast_shapes(keys, valid_data, device, axis, message)

    # One message: an element that is 1 if the data is valid, else 0, followed by the elements of all tensors.
    counts = [1, *(shape.numel() for shape in shapes)]
    packed = torch.zeros(sum(counts), dtype=datatype, device=device)
    if valid_data is not None:
        is_valid = torch.ones(1, dtype=datatype, device=device)
        torch.cat([is_valid, *(to_device(valid_data[key].reshape(-1), device) for key in keys)], out=packed)
    dist.broadcast(packed.view(torch.uint8), axis.first, group=axis.group)  # gloo and NCCL lack some dtypes
    # Reading packed[0] would wait for an accelerator, so there only the first rank raises.
    if problem or (device.type == "cpu" and not packed[0]):
        raise ValueError(message)

    _, *flat_tensors = torch.split(packed, counts)
    return {key: flat.view(shape) for key, flat, shape in zip(keys, flat_tensors, shapes, strict=True)}


def default_device(axis: Axis) -> torch.device:
    """Return the device on which the group's ranks compute: the CPU for gloo, on a Mac or without an accelerator."""
    if axis.group is not None and dist.get_backend(axis.group) == "gloo":
        return torch.device("cpu")
    device = torch.accelerator.current_accelerator(check_available=True)
    return device if device is not None and device.type != "mps" else torch.device("cpu")
