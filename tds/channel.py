"""Transport of a tuple of tensors over one stage boundary: one message, no casts, and sends do not block the host.

The first activation of a step is preceded by a header: shapes, dtypes, flags, and how many micro-batches share
them. The other micro-batches of this run need no header, so the receiver posts their buffers before it computes.
Before the last message of a run, an 8-byte word says how many more micro-batches have the same layout. Zero means
that the next message has its own header; with data-dependent shapes every message has one. Gradients need no
header: they have the shapes of the activations that went the other way. One end only sends, the other only
receives, in the same order, for all chunks. borders.py describes which messages share a queue.
"""

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import trace
from ._torch import users
from .batches import DataEnded
from .boundary import BoundaryError
from .memory import Pool, alias
from .schedule import At

HEADER_SIZE = 1536  # bytes; room for about 60 tensors of 4 dimensions
WORD_SIZE = 8
ALIGN = 8  # bytes; each tensor of a message is padded to a multiple
GRAD, SPLIT = 1, 2

Layout = tuple[tuple[torch.dtype, int, torch.Size], ...]  # dtype, flags and shape of each tensor of a message


class BoundaryTensor(NamedTuple):
    """One tensor in transit, with its `grad` and `split` flags."""

    tensor: Tensor
    grad: bool = False
    split: bool = False


def layout_of(tensors: Sequence[BoundaryTensor]) -> Layout:
    """Return the dtypes, flags and shapes that a receiver needs to allocate buffers."""
    return tuple((p.tensor.dtype, GRAD * p.grad + SPLIT * p.split, p.tensor.shape) for p in tensors)


class Run:
    """Layouts of a step's messages as both ends of a channel know them.

    Messages before `end` have the announced layout. A word precedes message `end - 1` if the step continues after
    it and the run has more than one message.
    """

    def __init__(self, total: int) -> None:
        self.total, self.end, self._long = total, 0, False
        self.layout: Layout = ()

    def begin(self, layout: Layout, first: int, count: int) -> None:
        """Start a run of `count` messages of this layout, from number `first`, after a header."""
        self.layout, self.end, self._long = layout, first + count, count > 1

    def extend(self, count: int) -> None:
        """Extend the run by `count` messages, after a word."""
        self.end, self._long = self.end + count, count > 0

    def marker_due(self, index: int) -> bool:
        """Return whether a word precedes message `index`."""
        return self._long and index == self.end - 1 and self.end < self.total


class Posted(NamedTuple):
    """A posted receive; `layout` is None if it is of a word."""

    at: At
    work: Any
    payload: Tensor
    layout: Layout | None


@dataclass(eq=False)
class Channel:
    """One direction of one stage boundary, for all chunks.

    peer: global rank at the other end.
    ahead: how many receives are posted in advance; each holds a buffer.
    slice_group: the tensor-parallel ranks of this stage, over which split tensors are all-gathered.
    slice_rank, slice_size: this rank's index in that group, and its size.
    """

    peer: int
    group: Any
    device: torch.device
    pool: Pool
    ahead: int
    slice_group: Any
    slice_rank: int
    slice_size: int
    bytes_sent: int = 0
    _runs: dict[int, Run] = field(default_factory=dict)  # one run per chunk in this step
    _under_way: deque[tuple[Any, Tensor]] = field(default_factory=deque)
    _agenda: deque[At] = field(default_factory=deque)  # messages still to be posted, in the order of sending
    _layouts: dict[At, Layout | None] = field(default_factory=dict)  # known layouts of messages to be posted
    _words: set[At] = field(default_factory=set)  # messages preceded by a word
    _posted: deque[Posted] = field(default_factory=deque)

    def begin_step(self, total: int, agenda: Iterable[At] = ()) -> None:
        """Prepare for `total` micro-batches of each chunk. agenda: the receiver's order of messages."""
        self._runs = defaultdict(lambda: Run(total))
        self._agenda = deque(agenda)
        self._layouts, self._words = {}, set()
        self._posted.clear()

    # ------------------------------------------------- messages of known layout

    def send(self, tensors: Sequence[BoundaryTensor]) -> None:
        """Start sending tensors; returns at once.

        A single tensor without other users is sent from its own memory; all others are copied.
        """
        full = [p.tensor for p in tensors if p.tensor.numel()]
        lent = len(full) == 1 and users(full[0]) > 1
        payload = [self._bytes(self._part(p)) for p in tensors if p.tensor.numel()]
        if len(payload) > 1 or (lent and _same_memory(payload[0], full[0])):
            self._start(self._copy(payload))
        elif payload:
            self._start(payload[0])

    def expect(self, at: At, layout: Layout | None) -> None:
        """Set the layout of an expected message, so that its receive can be posted; None if it will not come."""
        self._layouts[at] = layout
        self._post(self.ahead)

    def take(self, at: At) -> list[BoundaryTensor]:
        """Wait for this message, which must be the next expected one."""
        self._post(1)
        found = self._next()
        if found.layout is None:
            self._go_on(at, int(found.payload.view(torch.int64).item()))
            found = self._next()
        if found.at != at or found.layout is None:
            raise RuntimeError(f"message {at} was asked for, but {found.at} comes first")
        parts = torch.split(found.payload, [self._part_bytes(*one) for one in found.layout])
        return [self._unpack(part, *one) for part, one in zip(parts, found.layout, strict=True)]

    # ------------------------------------------------ messages that announce others

    def send_next(self, at: At, same_until: int, tensors: Sequence[BoundaryTensor], what: str) -> None:
        """Send the activations of a micro-batch, with a header or word if one is due.

        same_until: the first micro-batch whose layout may differ. Raises BoundaryError if the layout changes
        earlier.
        """
        (index, chunk), layout = at, layout_of(tensors)
        run = self._runs[chunk]
        if index == run.end:
            run.begin(layout, index, same_until - index)
            self._start(self._header([same_until - index, *_words(layout)], what))
        elif layout != run.layout:
            raise BoundaryError(
                f"{what} puts out tensors of other number, shapes, dtypes or gradients for micro-batch {index} than for the one "
                f"before, though its inputs are alike; if they depend on the data, say PipelineModule(..., dynamic_shape=True)"
            )
        if run.marker_due(index):
            more = max(same_until - run.end, 0)
            run.extend(more)
            self._start(torch.tensor([more], device=self.device).view(torch.uint8))
        self.send(tensors)

    def send_end(self) -> None:
        """Send the end of the data instead of the first message of a step."""
        self._start(self._header([0], "the end of the data"))

    def take_next(self, at: At) -> list[BoundaryTensor]:
        """Wait for the activations of a micro-batch. Raises DataEnded."""
        index, chunk = at
        run = self._runs[chunk]
        if index == run.end:
            header = torch.empty(HEADER_SIZE, dtype=torch.uint8, device=self.device)
            dist.recv(header, self.peer, group=self.group)
            count, *tensors = json.loads(bytes(header.tolist()))
            if not count:
                raise DataEnded(f"the data of rank {self.peer} ended")
            layout = tuple((getattr(torch, dtype), flags, torch.Size(shape)) for dtype, flags, shape in tensors)
            run.begin(layout, index, count)
            self._expect_run(chunk, index)
        return self.take(at)

    def same_until(self, at: At) -> int:
        """Return the first micro-batch after `at` whose layout may differ, as announced by the sender."""
        return self._runs[at.chunk].end

    def _go_on(self, at: At, count: int) -> None:
        run = self._runs[at.chunk]
        before = run.end
        run.extend(count)
        self._expect_run(at.chunk, before)

    def _expect_run(self, chunk: int, first: int) -> None:
        run = self._runs[chunk]
        for at in (At(index, chunk) for index in range(first, run.end)):
            self._layouts[at] = run.layout
            if run.marker_due(at.micro):
                self._words.add(at)
        self._post(self.ahead)

    # ------------------------------------------------------------------- inside

    def waiting_for(self) -> str:
        """Describe the tensors of the next expected message."""
        layout = next((posted.layout for posted in self._posted if posted.layout), None)
        if layout is None:
            return ""
        return ": " + ", ".join(f"{str(dtype).removeprefix('torch.')} {list(shape)}" for dtype, _, shape in layout)

    def flush(self) -> None:
        """Wait until all sends have finished."""
        while self._under_way:
            self._under_way.popleft()[0].wait()

    def _next(self) -> Posted:
        """Wait for the oldest posted receive."""
        first = self._posted[0]
        if first.work is not None:
            first.work.wait()
        self._posted.popleft()
        self._post(self.ahead)
        return first

    def _post(self, messages: int) -> None:
        """Post receives of known layout until `messages` are pending."""
        while self._agenda and self._agenda[0] in self._layouts:
            if sum(posted.layout is not None for posted in self._posted) >= messages:
                return
            at = self._agenda.popleft()
            layout = self._layouts.pop(at)
            if at in self._words:
                self._post_one(at, WORD_SIZE, None)
            if layout is not None:
                self._post_one(at, sum(self._part_bytes(*one) for one in layout), layout)

    def _post_one(self, at: At, size: int, layout: Layout | None) -> None:
        payload = self.pool.take(size)
        work = dist.irecv(payload, self.peer, group=self.group) if size else None
        self._posted.append(Posted(at, work, payload, layout))

    def _start(self, buffer: Tensor) -> None:
        size = buffer.numel() * buffer.element_size()
        self.bytes_sent += size
        trace.sent(size)
        self._under_way.append((dist.isend(buffer, self.peer, group=self.group), buffer))
        while self._under_way and self._under_way[0][0].is_completed():
            self._under_way.popleft()

    def _copy(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts), out=self.pool.take(sum(part.numel() for part in parts)))

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

    def _part(self, crossing: BoundaryTensor) -> Tensor:
        flat = crossing.tensor.detach().contiguous().view(-1)
        if not crossing.split or self.slice_size == 1:
            return flat
        each = -(-flat.numel() // self.slice_size)
        part = flat[each * self.slice_rank : each * (self.slice_rank + 1)]
        return torch.nn.functional.pad(part, (0, each - part.numel()))

    @staticmethod
    def _bytes(part: Tensor) -> Tensor:
        raw = part.view(torch.uint8)
        gap = -raw.numel() % ALIGN
        return torch.nn.functional.pad(raw, (0, gap)) if gap else raw

    def _unpack(self, raw: Tensor, dtype: torch.dtype, flags: int, shape: torch.Size) -> BoundaryTensor:
        raw = raw[: self._part_numel(shape, flags) * dtype.itemsize]
        if raw.storage_offset() % dtype.itemsize:
            raw = raw.clone()  # a 16-byte dtype may start at a multiple of 8 only
        part = raw.view(dtype)
        if flags & SPLIT and self.slice_size > 1:
            parts = [torch.empty_like(part) for _ in range(self.slice_size)]
            dist.all_gather(parts, part, group=self.slice_group)
            part = torch.cat(parts)
        tensor = alias(part[: shape.numel()].view(shape))
        return BoundaryTensor(tensor, bool(flags & GRAD), bool(flags & SPLIT))


def _words(layout: Layout) -> list[Any]:
    return [(str(dtype).removeprefix("torch."), flags, shape) for dtype, flags, shape in layout]


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
