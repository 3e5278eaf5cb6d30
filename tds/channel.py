"""Transport of tensors over one stage boundary: one message per tuple, no casts, and sends that do not block.

A header precedes the first activation of a step. The header contains the layout of the activation (shapes, dtypes,
flags) and the number of consecutive micro-batches that have this layout, called a run. Later micro-batches of the run
need no header, so the receiver can post their receives before it computes. Another header precedes the next run. With
data-dependent shapes, every activation has a header. A gradient needs no header, because it has the shapes of the
activations of the same micro-batch. Headers go from host to host, so that no host waits for its device to read one.
neighbours.py describes which messages share a queue.
"""

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import trace
from ._torch import users
from .batches import DataEnded
from .boundary import BoundaryError
from .memory import Pool, alias, same_storage
from .schedule import At

HEADER_SIZE = 1536  # bytes; room for about 60 tensors of 4 dimensions
ALIGN = 8  # bytes; each tensor of a message is padded to a multiple of this
GRAD, SPLIT = 1, 2

Layout = tuple[tuple[torch.dtype, int, torch.Size], ...]  # dtype, flags and shape of each tensor of a message


class BoundaryTensor(NamedTuple):
    """One tensor in transit. grad: it needs a gradient. split: each tensor-parallel rank sends only a slice of it."""

    tensor: Tensor
    grad: bool = False
    split: bool = False


def layout_of(tensors: Sequence[BoundaryTensor]) -> Layout:
    """Return the dtypes, flags and shapes that a receiver needs to allocate buffers."""
    return tuple((p.tensor.dtype, GRAD * p.grad + SPLIT * p.split, p.tensor.shape) for p in tensors)


class LayoutRun(NamedTuple):
    """Run of messages with the same layout, up to micro-batch `end - 1`; sender and receiver keep one per chunk."""

    end: int = 0
    layout: Layout = ()


@dataclass(frozen=True)
class Link:
    """Connection between this rank and a rank of a neighbouring stage, in one direction, for all chunks.

    peer: global rank at the other end.
    group: process group of the messages. hosts: process group of the headers, for tensors in host memory.
    slice_group: the tensor-parallel ranks of this stage, over which split tensors are all-gathered.
    slice_rank, slice_size: this rank's index in that group, and its size.
    """

    peer: int
    group: Any
    hosts: Any
    pool: Pool
    slice_group: Any
    slice_rank: int
    slice_size: int

    def numel(self, flags: int, shape: torch.Size) -> int:
        """Return how many elements of a tensor this rank's message holds: all, or only a slice of a split tensor."""
        return -(-shape.numel() // self.slice_size) if flags & SPLIT else shape.numel()

    def size(self, dtype: torch.dtype, flags: int, shape: torch.Size) -> int:
        """Return the bytes that a tensor takes in a message."""
        size = self.numel(flags, shape) * dtype.itemsize
        return size + -size % ALIGN


class Sender:
    """The sending end of a link: it packs each tuple of tensors into one message and returns at once.

    `send` is for gradients, whose layout the receiver knows; `send_next` is for activations and sends layouts too.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.bytes_sent = 0
        self._runs: defaultdict[int, LayoutRun] = defaultdict(LayoutRun)  # the current run of each chunk
        self._pending: deque[tuple[Any, Tensor]] = deque()

    def begin_step(self) -> None:
        """Forget the layouts of the last step."""
        self._runs.clear()

    def send(self, tensors: Sequence[BoundaryTensor]) -> None:
        """Start sending tensors.

        A single tensor is sent from its own memory if no other tensor uses it; otherwise, the tensors are copied.
        """
        payload = self._payload(tensors)
        if payload is not None:
            self._start(payload)

    def send_next(self, at: At, same_until: int, tensors: Sequence[BoundaryTensor], what: str) -> None:
        """Send the activations of a micro-batch, after a header if a run begins.

        same_until: the first later micro-batch whose layout may differ. Raises BoundaryError if the layout changes
        earlier. what: beginning of error messages, e.g. `stage 0`.
        """
        layout = layout_of(tensors)
        run = self._runs[at.chunk]
        payload = self._payload(tensors)
        if at.micro == run.end:
            self._runs[at.chunk] = LayoutRun(same_until, layout)
            self._start_header([same_until - at.micro, *_as_json(layout)], what)
        elif layout != run.layout:
            raise BoundaryError(
                f"{what}: outputs of micro-batch {at.micro} differ in number, shape, dtype or requires_grad from those "
                f"of the previous micro-batch, although the inputs have equal shapes; if output shapes depend on the "
                f"data, use PipelineModule(..., dynamic_shape=True)"
            )
        if payload is not None:
            self._start(payload)

    def send_end(self) -> None:
        """Send a header that means the end of the data, in place of a step's first message; wait until it is sent."""
        self._start_header([0], "the end of the data")
        self.flush()

    def flush(self) -> None:
        """Wait until all sends have finished."""
        while self._pending:
            self._pending.popleft()[0].wait()

    def __str__(self) -> str:
        return f"to rank {self.link.peer}"

    def _start(self, buffer: Tensor, group: Any = None) -> None:
        self.bytes_sent += buffer.nbytes
        trace.sent(buffer.nbytes)
        work = dist.isend(buffer, self.link.peer, group=group or self.link.group)
        self._pending.append((work, buffer))
        while self._pending and self._pending[0][0].is_completed():
            self._pending.popleft()

    def _payload(self, tensors: Sequence[BoundaryTensor]) -> Tensor | None:
        """Return the bytes of a message; None if no tensor has elements."""
        parts: list[Tensor] = []
        must_copy = False
        for each in tensors:
            if each.tensor.numel():
                # Before `_slice` makes views: another user of the tensor could change it while it is sent.
                is_shared = users(each.tensor) > 1
                part = _padded_bytes(self._slice(each))
                must_copy = bool(parts) or (is_shared and same_storage(part, each.tensor))
                parts.append(part)
        if must_copy:
            return self._copy(parts)
        return parts[0] if parts else None

    def _copy(self, parts: list[Tensor]) -> Tensor:
        size = sum(part.numel() for part in parts)
        return torch.cat(parts, out=self.link.pool.take(size))

    def _start_header(self, content: list[Any], what: str) -> None:
        text = json.dumps(content).encode()
        if len(text) > HEADER_SIZE:
            raise BoundaryError(f"{what}: {len(content) - 1} tensors are too many for one boundary; stack some of them")
        header = torch.frombuffer(bytearray(text.ljust(HEADER_SIZE)), dtype=torch.uint8)
        self._start(header, self.link.hosts)

    def _slice(self, crossing: BoundaryTensor) -> Tensor:
        """Return the part of a tensor that this rank sends, as a flat tensor."""
        flat = crossing.tensor.detach().contiguous().view(-1)
        link = self.link
        if not crossing.split or link.slice_size == 1:
            return flat
        each = link.numel(SPLIT, crossing.tensor.shape)
        part = flat[each * link.slice_rank : each * (link.slice_rank + 1)]
        return torch.nn.functional.pad(part, (0, each - part.numel()))


class Posted(NamedTuple):
    """A posted receive. at: (micro-batch, chunk) of the message. work: its handle. payload: buffer for the message."""

    at: At
    work: Any
    payload: Tensor
    layout: Layout


class Receiver:
    """The receiving end of a link: it posts receives of known layout in advance and returns messages in order.

    `take_next` reads the layout of activations from a header. `expect` sets the layout of gradients, which is the
    layout of the activations that this stage sent.

    A receive is posted before the stage needs its message. If `ahead` is a number (on a CPU), a receive is posted as
    soon as fewer than `ahead` receives are pending. If `ahead` is None, posting.py computes after which pass of the
    stage each receive is posted. The receive's buffer is allocated right after this pass, so that no allocation, which
    may synchronize the device, comes between two messages.
    """

    def __init__(self, link: Link, ahead: int | None) -> None:
        self.link = link
        self._ahead = ahead or 0
        self._points: Mapping[At, int] = {}
        self._passes = 0
        self._reserved: dict[At, Tensor] = {}  # buffers of receives that are not posted yet
        self._runs: defaultdict[int, LayoutRun] = defaultdict(LayoutRun)  # the current run of each chunk
        self._ends: dict[At, int] = {}  # for each message of the step, the end of its run
        self._agenda: deque[At] = deque()  # messages without a posted receive, in the order of sending
        self._layouts: dict[At, Layout | None] = {}  # layouts of these messages, once known
        self._posted: deque[Posted] = deque()

    def begin_step(self, agenda: Iterable[At], points: Mapping[At, int]) -> None:
        """Prepare for the messages of a step.

        agenda: messages in the order in which they are sent. points: message -> how many passes this stage runs before
        it posts the receive; empty if the receiver's `ahead` decides when receives are posted.
        """
        self._runs.clear()
        self._ends.clear()
        self._agenda = deque(agenda)
        self._points = points
        self._passes = 0
        self._layouts = {}
        self._reserved = {}
        self._posted.clear()

    def expect(self, at: At, layout: Layout | None) -> None:
        """Set the layout of an expected message, so that its receive can be posted.

        layout: None if the message has no content and is not sent.
        """
        self._layouts[at] = layout
        self._reserve()

    def after_pass(self) -> None:
        """Count a pass of this stage, and allocate the buffers of the receives that are due after it."""
        self._passes += 1
        self._reserve()

    def post(self) -> None:
        """Post all receives that are due."""
        self._post(self._ahead)

    def take(self, at: At) -> list[BoundaryTensor]:
        """Wait for the message of micro-batch and chunk `at`. Raises RuntimeError if another message comes first."""
        self._post(1)
        message = self._next()
        if message.at != at:
            raise RuntimeError(f"message {at} was requested, but {message.at} comes first")
        found = []
        begin = 0
        for each in message.layout:
            end = begin + self.link.size(*each)
            found.append(self._unpack(message.payload[begin:end], *each))
            begin = end
        return found

    def take_next(self, at: At) -> list[BoundaryTensor]:
        """Wait for the activations of a micro-batch, and for the header before them if a run has ended.

        Raises DataEnded if the header means the end of the data.
        """
        if at.micro == self._runs[at.chunk].end:
            self._receive_header(at)
        return self.take(at)

    def _receive_header(self, at: At) -> None:
        """Wait for the header of the run that begins at a micro-batch, and note the layout of the run's messages."""
        header = torch.empty(HEADER_SIZE, dtype=torch.uint8)
        dist.recv(header, self.link.peer, group=self.link.hosts)
        count, *tensors = json.loads(header.numpy().tobytes())
        if not count:
            raise DataEnded(f"the data of rank {self.link.peer} ended")
        layout = tuple((getattr(torch, dtype), flags, torch.Size(shape)) for dtype, flags, shape in tensors)
        end = at.micro + count
        self._runs[at.chunk] = LayoutRun(end, layout)
        for micro in range(at.micro, end):
            self._layouts[At(micro, at.chunk)] = layout
            self._ends[At(micro, at.chunk)] = end

    def same_until(self, at: At) -> int:
        """Return the first micro-batch after `at` whose layout may differ, according to the sender.

        The stage may have received messages of later runs.
        """
        return self._ends[at]

    def __str__(self) -> str:
        """Describe the sending rank and the tensors of the next expected message."""
        layout = self._posted[0].layout if self._posted else ()
        tensors = ", ".join(f"{dtype} {list(shape)}" for dtype, _, shape in _as_json(layout))
        return f"from rank {self.link.peer}{tensors and ': '}{tensors}"

    def _next(self) -> Posted:
        """Wait for the oldest posted receive."""
        first = self._posted[0]
        if first.work is not None:
            first.work.wait()
        self._posted.popleft()
        self._post(self._ahead)
        return first

    def _is_due(self, at: At) -> bool:
        return at in self._points and self._points[at] <= self._passes

    def _reserve(self) -> None:
        for at in self._agenda:
            if at not in self._layouts or not self._is_due(at):
                return
            layout = self._layouts[at]
            if layout is not None and at not in self._reserved:
                self._reserved[at] = self._buffer(layout)

    def _buffer(self, layout: Layout) -> Tensor:
        return self.link.pool.take(sum(self.link.size(*each) for each in layout))

    def _post(self, messages: int) -> None:
        """Post receives of known layout: all that are due, then others until `messages` receives are pending."""
        while self._agenda and self._agenda[0] in self._layouts:
            at = self._agenda[0]
            if len(self._posted) >= messages and not self._is_due(at):
                return
            self._agenda.popleft()
            layout = self._layouts.pop(at)
            if layout is None:
                continue
            payload = self._reserved.pop(at, None)
            if payload is None:
                payload = self._buffer(layout)
            work = None
            if payload.numel():
                work = dist.irecv(payload, self.link.peer, group=self.link.group)
            self._posted.append(Posted(at, work, payload, layout))

    def _unpack(self, raw: Tensor, dtype: torch.dtype, flags: int, shape: torch.Size) -> BoundaryTensor:
        raw = raw[: self.link.numel(flags, shape) * dtype.itemsize]
        if raw.storage_offset() % dtype.itemsize:
            raw = raw.clone()  # tensors in a message begin at multiples of 8 bytes, but complex128 needs 16
        part = raw.view(dtype)
        if flags & SPLIT and self.link.slice_size > 1:
            parts = [torch.empty_like(part) for _ in range(self.link.slice_size)]
            dist.all_gather(parts, part, group=self.link.slice_group)
            part = torch.cat(parts)
        tensor = alias(part[: shape.numel()].view(shape))
        return BoundaryTensor(tensor, bool(flags & GRAD), bool(flags & SPLIT))


def _as_json(layout: Layout) -> list[Any]:
    return [(str(dtype).removeprefix("torch."), flags, shape) for dtype, flags, shape in layout]


def _padded_bytes(part: Tensor) -> Tensor:
    raw = part.view(torch.uint8)
    gap = -raw.numel() % ALIGN
    return torch.nn.functional.pad(raw, (0, gap)) if gap else raw
