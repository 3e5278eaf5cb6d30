"""How a tuple of tensors travels over one border between two stages: one message, nothing cast, the host waits for no send.

The first activation of a step is preceded by a header: shapes, dtypes and flags, and how many
micro-batches have them. The others of this run come without, so the receiver can have their buffers
posted before it computes. Before the last message of a run goes a word of 8 bytes: how many more
micro-batches have the same layout; none means that the next message has a header of its own, and so
has every message where shapes depend on the data. Gradients need no header: they look like the
activations that went the other way. One end only sends, the other only receives, in the same order,
whichever chunk a message belongs to; which messages stand in one queue is said in borders.py.
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

HEADER_SIZE = 1536  # bytes: room for about 60 tensors of 4 dimensions
WORD_SIZE = 8
ALIGN = 8  # bytes; each tensor of a message is padded to a multiple
GRAD, SPLIT = 1, 2

Layout = tuple[tuple[torch.dtype, int, torch.Size], ...]  # dtype, flags and shape of each tensor of a message


class BoundaryTensor(NamedTuple):
    """One tensor on its way, and whether a gradient comes back and whether it is split."""

    tensor: Tensor
    grad: bool = False
    split: bool = False


def layout_of(tensors: Sequence[BoundaryTensor]) -> Layout:
    """What a receiver must know to make room: dtypes and shapes."""
    return tuple((p.tensor.dtype, GRAD * p.grad + SPLIT * p.split, p.tensor.shape) for p in tensors)


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
        """Whether the sender says now that the shapes change."""
        return self._long and index == self.end - 1 and self.end < self.total


class Posted(NamedTuple):
    """A receive that is under way; without a layout it is of a word."""

    at: At
    work: Any
    payload: Tensor
    layout: Layout | None


@dataclass(eq=False)
class Channel:
    """One direction of one border, for all chunks.

    peer: global rank at the other end. ahead: how many messages are received in the background before they are
    asked for; each holds a buffer. slice_group: the tensor-parallel ranks of this stage, over which split tensors
    are gathered; slice_rank and slice_size: this rank's place among them.
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
    _runs: dict[int, Run] = field(default_factory=dict)  # by chunk, of the step under way
    _under_way: deque[tuple[Any, Tensor]] = field(default_factory=deque)
    _agenda: deque[At] = field(default_factory=deque)  # what is still to be posted, in the order in which it is sent
    _layouts: dict[At, Layout | None] = field(default_factory=dict)  # of what is to be posted, as far as they are known
    _words: set[At] = field(default_factory=set)  # messages before which a word comes
    _posted: deque[Posted] = field(default_factory=deque)

    def begin_step(self, total: int, agenda: Iterable[At] = ()) -> None:
        """`total` micro-batches of each chunk will cross; agenda: in which order, for the end that receives."""
        self._runs = defaultdict(lambda: Run(total))
        self._agenda = deque(agenda)
        self._layouts, self._words = {}, set()
        self._posted.clear()

    # ------------------------------------------------- messages of known layout

    def send(self, tensors: Sequence[BoundaryTensor]) -> None:
        """Start sending; returns at once. A tensor that nobody else looks at is sent from where it lies, others are copied."""
        full = [p.tensor for p in tensors if p.tensor.numel()]
        lent = len(full) == 1 and users(full[0]) > 1
        payload = [self._bytes(self._part(p)) for p in tensors if p.tensor.numel()]
        if len(payload) > 1 or (lent and _same_memory(payload[0], full[0])):
            self._start(self._copy(payload))
        elif payload:
            self._start(payload[0])

    def expect(self, at: At, layout: Layout | None) -> None:
        """This message of the agenda has this layout; None: it does not come."""
        self._layouts[at] = layout
        self._post(self.ahead)

    def take(self, at: At) -> list[BoundaryTensor]:
        """Wait for this message, the first of those that are expected."""
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
        """Send the activations of a micro-batch, with header and word as they are due.

        same_until: the first micro-batch whose layout may be another. Raises BoundaryError where this was promised wrongly.
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
        if run.word_is_due(index):
            more = max(same_until - run.end, 0)
            run.go_on(more)
            self._start(torch.tensor([more], device=self.device).view(torch.uint8))
        self.send(tensors)

    def send_end(self) -> None:
        """Say that the data have ended, instead of the first message of a step."""
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
        """The first micro-batch after `at` that may look different, as far as the other end has said."""
        return self._runs[at.chunk].end

    def _go_on(self, at: At, count: int) -> None:
        run = self._runs[at.chunk]
        before = run.end
        run.go_on(count)
        self._expect_run(at.chunk, before)

    def _expect_run(self, chunk: int, first: int) -> None:
        run = self._runs[chunk]
        for at in (At(index, chunk) for index in range(first, run.end)):
            self._layouts[at] = run.layout
            if run.word_is_due(at.micro):
                self._words.add(at)
        self._post(self.ahead)

    # ------------------------------------------------------------------- inside

    def waiting_for(self) -> str:
        """The tensors of the next message that is expected, in words."""
        layout = next((posted.layout for posted in self._posted if posted.layout), None)
        if layout is None:
            return ""
        return ": " + ", ".join(f"{str(dtype).removeprefix('torch.')} {list(shape)}" for dtype, _, shape in layout)

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        while self._under_way:
            self._under_way.popleft()[0].wait()

    def _next(self) -> Posted:
        """Wait for what was posted first."""
        first = self._posted[0]
        if first.work is not None:
            first.work.wait()
        self._posted.popleft()
        self._post(self.ahead)
        return first

    def _post(self, messages: int) -> None:
        """Have up to `messages` under way, as far as it is known what they look like."""
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
            raw = raw.clone()  # of 16 bytes an element, after one that ends in the middle of 16
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
