"""Broadcast of the shapes of a batch, for data whose shapes the other ranks do not know."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .data import MAX_DIMS
from .mesh import Axis


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
    return [torch.Size(row[1 : 1 + row[0]]) for row in rows]
