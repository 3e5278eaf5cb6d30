"""How a tuple of tensors travels to a neighbouring stage: one header, one message, nothing cast.

The header (shapes, dtypes, flags) goes with every message, so shapes may change from one
micro-batch to the next without notice. Sends never block: the buffers are kept until the
transfer is done. Activations and gradients use process groups of their own, so the two
directions cannot wait for each other.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .boundary import BoundaryError

DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
HEADER_SIZE = 256  # int64 numbers: room for 36 tensors of 4 dimensions
GRAD, SPLIT = 1, 2


class Parcel(NamedTuple):
    """One tensor on its way, and whether a gradient comes back and whether it is split."""

    tensor: Tensor
    grad: bool = False
    split: bool = False


class Channel:
    """The link of this rank to the same place in a neighbouring stage.

    peer: global rank there. slice_group: the tensor-parallel ranks of this stage, over which
    split tensors are gathered; slice_rank and slice_size: this rank's place among them.
    """

    def __init__(
        self, peer: int, group: Any, device: torch.device, slice_group: Any, slice_rank: int, slice_size: int
    ) -> None:
        self.peer, self.group, self.device = peer, group, device
        self.slice_group, self.slice_rank, self.slice_size = slice_group, slice_rank, slice_size
        self.bytes_sent = 0
        self._under_way: deque[tuple[Any, Tensor]] = deque()

    def send(self, parcels: Sequence[Parcel], what: str) -> None:
        """Start sending; returns at once."""
        self._start(self._header(parcels, what))
        payload = [self._bytes(self._part(p)) for p in parcels if p.tensor.numel()]
        if payload:
            self._start(payload[0] if len(payload) == 1 else torch.cat(payload))

    def recv(self) -> list[Parcel]:
        """Wait for the next message of the peer."""
        header = torch.empty(HEADER_SIZE, dtype=torch.int64, device=self.device)
        dist.recv(header, self.peer, group=self.group)
        numbers = header.tolist()
        layout, at = [], 1
        for _ in range(numbers[0]):
            dtype, flags, dims = DTYPES[numbers[at]], numbers[at + 1], numbers[at + 2]
            layout.append((dtype, flags, torch.Size(numbers[at + 3 : at + 3 + dims])))
            at += 3 + dims
        sizes = [self._part_bytes(dtype, flags, shape) for dtype, flags, shape in layout]
        payload = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        if payload.numel():
            dist.recv(payload, self.peer, group=self.group)
        parts = torch.split(payload, sizes)
        return [self._unpack(part, *one) for part, one in zip(parts, layout, strict=True)]

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        while self._under_way:
            self._under_way.popleft()[0].wait()

    def _start(self, buffer: Tensor) -> None:
        self.bytes_sent += buffer.numel() * buffer.element_size()
        self._under_way.append((dist.isend(buffer, self.peer, group=self.group), buffer))
        while self._under_way and self._under_way[0][0].is_completed():
            self._under_way.popleft()

    def _header(self, parcels: Sequence[Parcel], what: str) -> Tensor:
        numbers = [len(parcels)]
        for parcel in parcels:
            if parcel.tensor.dtype not in DTYPES:
                raise BoundaryError(f"{what}: a tensor of {parcel.tensor.dtype} cannot cross a stage boundary")
            flags = GRAD * parcel.grad + SPLIT * parcel.split
            numbers += [DTYPES.index(parcel.tensor.dtype), flags, parcel.tensor.dim(), *parcel.tensor.shape]
        if len(numbers) > HEADER_SIZE:
            raise BoundaryError(f"{what}: {len(parcels)} tensors are too many for one boundary; stack some of them")
        return torch.tensor(numbers + [0] * (HEADER_SIZE - len(numbers)), dtype=torch.int64, device=self.device)

    def _part_numel(self, shape: torch.Size, flags: int) -> int:
        return -(-shape.numel() // self.slice_size) if flags & SPLIT else shape.numel()

    def _part_bytes(self, dtype: torch.dtype, flags: int, shape: torch.Size) -> int:
        size = self._part_numel(shape, flags) * dtype.itemsize
        return -(-size // 8) * 8  # padded, so that every tensor in the message stays aligned

    def _part(self, parcel: Parcel) -> Tensor:
        flat = parcel.tensor.detach().contiguous().view(-1)
        if not parcel.split or self.slice_size == 1:
            return flat
        each = -(-flat.numel() // self.slice_size)
        part = flat[each * self.slice_rank : each * (self.slice_rank + 1)]
        return torch.nn.functional.pad(part, (0, each - part.numel()))

    @staticmethod
    def _bytes(part: Tensor) -> Tensor:
        raw = part.view(torch.uint8)
        gap = -raw.numel() % 8
        return torch.nn.functional.pad(raw, (0, gap)) if gap else raw

    def _unpack(self, raw: Tensor, dtype: torch.dtype, flags: int, shape: torch.Size) -> Parcel:
        part = raw[: self._part_numel(shape, flags) * dtype.itemsize].view(dtype)
        if flags & SPLIT and self.slice_size > 1:
            parts = [torch.empty_like(part) for _ in range(self.slice_size)]
            dist.all_gather(parts, part, group=self.slice_group)
            part = torch.cat(parts)
        tensor = part[: shape.numel()].view(shape)
        return Parcel(tensor, bool(flags & GRAD), bool(flags & SPLIT))
