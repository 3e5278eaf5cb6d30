"""How a tuple of tensors travels over one border between two stages: one message, nothing cast, nobody waits for a send.

The first activation of a step is preceded by a header: shapes, dtypes and flags, and how many
micro-batches have them. The others of this run come without, so the receiver can have their buffers
posted before it computes. Before the last message of a run goes a word of 8 bytes: how many more
micro-batches have the same layout; none means that the next message has a header of its own, and so
has every message where shapes depend on the data. Gradients need no header: they look like the
activations that went the other way. Each direction of each border has a process group of its own:
one end only sends there, the other only receives, in the same order (see timetable.py), so no
message waits for another, whatever the backend.
"""

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .batches import DataEnded
from .boundary import BoundaryError
from .memory import Pool, alias, users

HEADER_SIZE = 1536  # bytes: room for about 60 tensors of 4 dimensions
WORD_SIZE = 8
ALIGN = 8  # bytes; each tensor of a message is padded to a multiple
GRAD, SPLIT = 1, 2
POSTED_AHEAD = 2  # messages whose receives wait in the background; each holds a buffer

Layout = tuple[tuple[torch.dtype, int, torch.Size], ...]  # dtype, flags and shape of each tensor of a message


class Parcel(NamedTuple):
    """One tensor on its way, and whether a gradient comes back and whether it is split."""

    tensor: Tensor
    grad: bool = False
    split: bool = False


def layout_of(parcels: Sequence[Parcel]) -> Layout:
    return tuple((p.tensor.dtype, GRAD * p.grad + SPLIT * p.split, p.tensor.shape) for p in parcels)


class Run:
    """What both ends of a channel know of the micro-batches of a step: those before `end` have the layout announced last.

    A word is due before the message `end - 1` if the step goes on after it and the run was longer than that one.
    """

    def __init__(self, total: int) -> None:
        self.total, self.end, self._long = total, 0, False
        self.layout: Layout = ()

    def begin(self, layout: Layout, first: int, count: int) -> None:
        """A header came: `count` messages from number `first` on look like this."""
        self.layout, self.end, self._long = layout, first + count, count > 1

    def go_on(self, count: int) -> None:
        """A word came."""
        self.end, self._long = self.end + count, count > 0

    def word_is_due(self, index: int) -> bool:
        return self._long and index == self.end - 1 and self.end < self.total


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
    run: Run = field(default_factory=lambda: Run(0))  # of the step under way
    _under_way: deque[tuple[Any, Tensor]] = field(default_factory=deque)
    _expected: deque[Layout | None] = field(default_factory=deque)  # None: a word
    _posted: deque[tuple[Any, Tensor, Layout | None]] = field(default_factory=deque)

    # ------------------------------------------------- messages of known layout

    def send(self, parcels: Sequence[Parcel]) -> None:
        """Start sending; returns at once. A tensor that nobody else looks at is sent from where it lies, others are copied."""
        full = [p.tensor for p in parcels if p.tensor.numel()]
        lent = len(full) == 1 and users(full[0]) > 1
        payload = [self._bytes(self._part(p)) for p in parcels if p.tensor.numel()]
        if len(payload) > 1 or (lent and _same_memory(payload[0], full[0])):
            together = self.pool.take(sum(part.numel() for part in payload))
            self._start(torch.cat(payload, out=together))
        elif payload:
            self._start(payload[0])

    def expect(self, layout: Layout) -> None:
        """A message of this layout will come; be ready for it. Messages come in the order they are expected in."""
        self._expected.append(layout)
        self._post()

    def take(self) -> list[Parcel]:
        """Wait for the first of the messages that are expected."""
        payload, layout = self._next()
        while layout is None:
            self._go_on(int(payload.view(torch.int64).item()))
            payload, layout = self._next()
        parts = torch.split(payload, [self._part_bytes(*one) for one in layout])
        return [self._unpack(part, *one) for part, one in zip(parts, layout, strict=True)]

    # ------------------------------------------------ messages that announce others

    def begin_step(self, total: int) -> None:
        """Activations of `total` micro-batches will cross, in either role."""
        self.run = Run(total)

    def send_next(self, index: int, same_until: int, parcels: Sequence[Parcel], what: str) -> None:
        """Send number `index` of the step, with header and word as they are due.

        same_until: the first micro-batch whose layout may be another. Raises BoundaryError where this was promised wrongly.
        """
        run, layout = self.run, layout_of(parcels)
        if index == run.end:
            run.begin(layout, index, same_until - index)
            self._start(self._header([same_until - index, *_words(layout)], what))
        elif layout != run.layout:
            raise BoundaryError(
                f"{what} puts out other shapes for micro-batch {index} than for the one before, though its inputs have the "
                f"same; if shapes depend on the data, say PipelineModule(..., dynamic_shape=True)"
            )
        if run.word_is_due(index):
            more = max(same_until - run.end, 0)
            run.go_on(more)
            self._start(torch.tensor([more], device=self.device).view(torch.uint8))
        self.send(parcels)

    def send_end(self) -> None:
        """Say that the data have ended, instead of the first message of a step."""
        self._start(self._header([0], "the end of the data"))

    def take_next(self, index: int) -> list[Parcel]:
        """Wait for number `index` of the step; afterwards `run.end` says how far its layout reaches. Raises DataEnded."""
        if index == self.run.end:
            header = torch.empty(HEADER_SIZE, dtype=torch.uint8, device=self.device)
            dist.recv(header, self.peer, group=self.group)
            count, *tensors = json.loads(bytes(header.tolist()))
            if not count:
                raise DataEnded(f"the data of rank {self.peer} ended")
            layout = tuple((getattr(torch, dtype), flags, torch.Size(shape)) for dtype, flags, shape in tensors)
            self.run.begin(layout, index, count)
            self._expect_run(index)
        return self.take()

    def _go_on(self, count: int) -> None:
        before = self.run.end
        self.run.go_on(count)
        self._expect_run(before)

    def _expect_run(self, first: int) -> None:
        for index in range(first, self.run.end):
            if self.run.word_is_due(index):
                self._expected.append(None)
            self._expected.append(self.run.layout)
        self._post()

    # ------------------------------------------------------------------- inside

    def waiting_for(self) -> str:
        """The tensors of the next message that is expected, in words."""
        layout = next((layout for *_, layout in self._posted if layout), None)
        if layout is None:
            return ""
        return ": " + ", ".join(f"{str(dtype).removeprefix('torch.')} {list(shape)}" for dtype, _, shape in layout)

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        while self._under_way:
            self._under_way.popleft()[0].wait()

    def _next(self) -> tuple[Tensor, Layout | None]:
        """Wait for what was posted first."""
        work, payload, layout = self._posted[0]
        if work is not None:
            work.wait()
        self._posted.popleft()
        self._post()
        return payload, layout

    def _post(self) -> None:
        while self._expected and sum(layout is not None for *_, layout in self._posted) < POSTED_AHEAD:
            layout = self._expected.popleft()
            size = WORD_SIZE if layout is None else sum(self._part_bytes(*one) for one in layout)
            payload = self.pool.take(size)
            work = dist.irecv(payload, self.peer, group=self.group) if size else None
            self._posted.append((work, payload, layout))

    def _start(self, buffer: Tensor) -> None:
        self.bytes_sent += buffer.numel() * buffer.element_size()
        self._under_way.append((dist.isend(buffer, self.peer, group=self.group), buffer))
        while self._under_way and self._under_way[0][0].is_completed():
            self._under_way.popleft()

    def _header(self, content: list[Any], what: str) -> Tensor:
        text = json.dumps(content).encode()
        if len(text) > HEADER_SIZE:
            raise BoundaryError(f"{what}: {len(content) - 1} tensors are too many for one boundary; stack some of them")
        return torch.tensor(list(text.ljust(HEADER_SIZE)), dtype=torch.uint8, device=self.device)

    def _part_numel(self, shape: torch.Size, flags: int) -> int:
        return -(-shape.numel() // self.slice_size) if flags & SPLIT else shape.numel()

    def _part_bytes(self, dtype: torch.dtype, flags: int, shape: torch.Size) -> int:
        size = self._part_numel(shape, flags) * dtype.itemsize
        return size + -size % ALIGN

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
        gap = -raw.numel() % ALIGN
        return torch.nn.functional.pad(raw, (0, gap)) if gap else raw

    def _unpack(self, raw: Tensor, dtype: torch.dtype, flags: int, shape: torch.Size) -> Parcel:
        raw = raw[: self._part_numel(shape, flags) * dtype.itemsize]
        if raw.storage_offset() % dtype.itemsize:
            raw = raw.clone()  # of 16 bytes an element, behind one that ends in the middle of 16
        part = raw.view(dtype)
        if flags & SPLIT and self.slice_size > 1:
            parts = [torch.empty_like(part) for _ in range(self.slice_size)]
            dist.all_gather(parts, part, group=self.slice_group)
            part = torch.cat(parts)
        tensor = alias(part[: shape.numel()].view(shape))
        return Parcel(tensor, bool(flags & GRAD), bool(flags & SPLIT))


def _words(layout: Layout) -> list[Any]:
    return [(str(dtype).removeprefix("torch."), flags, shape) for dtype, flags, shape in layout]


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
