"""How a tuple of tensors travels over one border between two stages: one message, nothing cast, nobody waits for a send.

The first activation of a step is preceded by a header (shapes, dtypes, flags). If all
micro-batches of the step have the same shapes, the others come without, so the receiver can
have their buffers posted before it computes; otherwise each has its own header. Gradients need
none: they look like the activations that went the other way. Shapes may change from step to
step without notice. Each direction of each border has a process group of its own: one end only
sends there, the other only receives, in the same order (see timetable.py), so no message waits
for another, whatever the backend.
"""

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .boundary import BoundaryError

HEADER_SIZE = 2048  # bytes: room for about 80 tensors of 4 dimensions
GRAD, SPLIT = 1, 2
POSTED_AHEAD = 2  # receives that wait in the background; each holds a buffer

Layout = tuple[tuple[torch.dtype, int, torch.Size], ...]  # dtype, flags and shape of each tensor of a message


class Parcel(NamedTuple):
    """One tensor on its way, and whether a gradient comes back and whether it is split."""

    tensor: Tensor
    grad: bool = False
    split: bool = False


def layout_of(parcels: Sequence[Parcel]) -> Layout:
    return tuple((p.tensor.dtype, GRAD * p.grad + SPLIT * p.split, p.tensor.shape) for p in parcels)


def _users(buffer: Tensor) -> int:
    return int(torch._C._storage_Use_Count(buffer.untyped_storage()._cdata))  # type: ignore[attr-defined]


class Pool:
    """Buffers by size, handed out again only when no tensor looks into them any more.

    A received tensor may live on in autograd's graph, in another message or in a user's
    variable, so nobody gives a buffer back: torch's count of a storage's users tells.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle = _users(torch.empty(1, device=device))
        self._buffers: dict[int, list[Tensor]] = {}
        self._wanted: set[int] = set()

    def take(self, size: int) -> Tensor:
        """`size` bytes, as a uint8 tensor."""
        self._wanted.add(size)
        buffers = self._buffers.setdefault(size, [])
        for buffer in buffers:
            if _users(buffer) == self._idle:
                return buffer.view(-1)
        buffers.append(torch.empty(size, dtype=torch.uint8, device=self._device))
        return buffers[-1].view(-1)

    def trim(self) -> None:
        """Forget the sizes that nobody has asked for since the last call."""
        self._buffers = {size: buffers for size, buffers in self._buffers.items() if size in self._wanted}
        self._wanted.clear()


@dataclass(eq=False)
class Channel:
    """One direction of one border.

    peer: global rank at the other end. slice_group: the tensor-parallel ranks of this stage, over
    which split tensors are gathered; slice_rank and slice_size: this rank's place among them.
    """

    peer: int
    group: Any
    device: torch.device
    pool: Pool
    slice_group: Any
    slice_rank: int
    slice_size: int
    bytes_sent: int = 0
    _under_way: deque[tuple[Any, Tensor]] = field(default_factory=deque)
    _expected: deque[Layout] = field(default_factory=deque)
    _posted: deque[tuple[Any, Tensor, Layout]] = field(default_factory=deque)

    def send(self, parcels: Sequence[Parcel], what: str, header: bool, uniform: bool = False) -> None:
        """Start sending; returns at once.

        header: let the layout go first. uniform: and promise that the rest of the step has it, too.
        """
        if header:
            self._start(self._header(parcels, what, uniform))
        payload = [self._bytes(self._part(p)) for p in parcels if p.tensor.numel()]
        if len(payload) > 1:
            together = self.pool.take(sum(part.numel() for part in payload))
            self._start(torch.cat(payload, out=together))
        elif payload:
            self._start(payload[0])

    def recv_header(self) -> tuple[Layout, bool]:
        """Wait for a header: the layout of the message behind it, and whether the rest of the step has it, too."""
        header = torch.empty(HEADER_SIZE, dtype=torch.uint8, device=self.device)
        dist.recv(header, self.peer, group=self.group)
        uniform, *tensors = json.loads(bytes(header.tolist()))
        return tuple((getattr(torch, dtype), flags, torch.Size(shape)) for dtype, flags, shape in tensors), uniform

    def expect(self, layout: Layout) -> None:
        """A message of this layout will come; be ready for it. Messages come in the order they are expected in."""
        self._expected.append(layout)
        self._post()

    def take(self) -> list[Parcel]:
        """Wait for the first of the messages that are expected."""
        work, payload, layout = self._posted[0]
        if work is not None:
            work.wait()
        self._posted.popleft()
        self._post()
        parts = torch.split(payload, [self._part_bytes(*one) for one in layout])
        return [self._unpack(part, *one) for part, one in zip(parts, layout, strict=True)]

    def waiting_for(self) -> str:
        """The tensors of the next message that is expected, in words."""
        if not self._posted:
            return ""
        layout = self._posted[0][2]
        return ": " + ", ".join(f"{str(dtype).removeprefix('torch.')} {list(shape)}" for dtype, _, shape in layout)

    def _post(self) -> None:
        while self._expected and len(self._posted) < POSTED_AHEAD:
            layout = self._expected.popleft()
            size = sum(self._part_bytes(*one) for one in layout)
            payload = self.pool.take(size)
            work = dist.irecv(payload, self.peer, group=self.group) if size else None
            self._posted.append((work, payload, layout))

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        while self._under_way:
            self._under_way.popleft()[0].wait()

    def _start(self, buffer: Tensor) -> None:
        self.bytes_sent += buffer.numel() * buffer.element_size()
        self._under_way.append((dist.isend(buffer, self.peer, group=self.group), buffer))
        while self._under_way and self._under_way[0][0].is_completed():
            self._under_way.popleft()

    def _header(self, parcels: Sequence[Parcel], what: str, uniform: bool) -> Tensor:
        tensors = [(str(dtype).removeprefix("torch."), flags, shape) for dtype, flags, shape in layout_of(parcels)]
        text = json.dumps([uniform, *tensors]).encode()
        if len(text) > HEADER_SIZE:
            raise BoundaryError(f"{what}: {len(parcels)} tensors are too many for one boundary; stack some of them")
        return torch.tensor(list(text.ljust(HEADER_SIZE)), dtype=torch.uint8, device=self.device)

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


Borders = dict[str, dict[int, Channel]]


def open_borders(grid: Any, device: torch.device, chunks: int) -> Borders:
    """The channels of this rank by role and chunk. Collective: every rank must call it.

    Roles: `above` brings activations in, `up` takes their gradients back; `down` takes
    activations out, `below` brings their gradients in.
    """
    stages, stage = grid.pipe_parallel_size, grid.get_stage_id()
    pool = Pool(device)
    slice_ = (grid.get_slice_parallel_group(), grid.get_slice_parallel_rank(), grid.get_slice_parallel_world_size())
    pipes = grid._topo.get_axis_comm_lists("pipe")
    borders: Borders = {role: {} for role in ("above", "up", "down", "below")}

    def pair() -> list[Any]:
        made = [[dist.new_group(ranks) for ranks in pipes] for _ in range(2)]
        mine = next(i for i, ranks in enumerate(pipes) if dist.get_rank() in ranks)
        return [groups[mine] for groups in made]

    def add(roles: tuple[str, str], chunk: int, other: int, groups: Any) -> None:
        for role, group in zip(roles, groups, strict=True):
            borders[role][chunk] = Channel(grid.stage_to_global(stage_id=other), group, device, pool, *slice_)

    # Between the chunks runs a border from the last stage to the first. With two stages it joins the same
    # pair of ranks the other way round, so it has groups of its own.
    for chunk in range(chunks if stages > 1 else 0):
        inside, around = pair(), pair() if chunk < chunks - 1 else None
        if stage < stages - 1:
            add(("down", "below"), chunk, stage + 1, inside)
        elif around:
            add(("down", "below"), chunk, 0, around)
        if stage > 0:
            add(("above", "up"), chunk, stage - 1, inside)
        elif around:
            add(("above", "up"), chunk + 1, stages - 1, around)
    return borders
