"""Transport of tensors over one stage boundary: one message per tuple, no casts, and sends that do not block.

A header precedes the first activation of a step. The header contains the layout of the activation (shapes, dtypes,
flags) and the number of consecutive micro-batches that have this layout, called a run. Later micro-batches of the run
need no header, so the receiver can post their receives before it computes. With data-dependent shapes, every activation
has a header. A gradient needs none, because it has the shapes of the activations of the same micro-batch. Headers go
from host to host, so that no host waits for its device. neighbours.py describes which messages share a queue.
"""

import json
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import trace
from ._torch import storage_use_count
from .batches import DataEnded
from .boundary import BoundaryError
from .memory import BufferPool, alias, same_storage
from .schedule import MicroChunk
from .sparse import gather_tensors

HEADER_SIZE = 1536  # bytes; room for about 60 tensors of 4 dimensions
ALIGN = 8  # bytes; each tensor of a message is padded to a multiple of this
GRAD, SPLIT, BARE = 1, 2, 4  # bits of the flags of a tensor in a header

Layout = tuple[tuple[torch.dtype, int, torch.Size], ...]  # dtype, flags and shape of each tensor of a message


class BoundaryTensor(NamedTuple):
    """One tensor in transit. needs_grad: a gradient comes back. is_split: each tensor-parallel rank sends a slice."""

    tensor: Tensor
    needs_grad: bool = False
    is_split: bool = False
    is_bare: bool = False  # whether the layer returned the tensor itself, not a tuple


def layout_of(tensors: Sequence[BoundaryTensor]) -> Layout:
    """Return the dtypes, flags (sums of GRAD, SPLIT and BARE) and shapes that a receiver needs to allocate buffers."""
    return tuple((t.dtype, GRAD * grad + SPLIT * split + BARE * bare, t.shape) for t, grad, split, bare in tensors)


class LayoutRun(NamedTuple):
    """Run of messages with the same layout, up to micro-batch `end - 1`; sender and receiver keep one per chunk."""

    end: int = 0
    layout: Layout = ()


class Link(NamedTuple):
    """Connection between this rank and a rank of a neighbouring stage, in one direction, for all chunks.

    peer: global rank at the other end.
    group: process group of the messages. header_group: process group of the headers, for tensors in host memory.
    slice_group: the tensor-parallel ranks of this stage, over which split tensors are all-gathered.
    slice_rank, slice_size: this rank's index in that group, and its size.
    """

    peer: int
    group: Any
    header_group: Any
    pool: BufferPool
    slice_group: Any
    slice_rank: int
    slice_size: int

    def local_numel(self, flags: int, shape: torch.Size) -> int:
        """Return how many elements of a tensor this rank's message holds: all, or only a slice of a split tensor."""
        if not flags & SPLIT:
            return shape.numel()
        return -(-shape.numel() // self.slice_size)  # rounded up, so that all slices have the same length

    def message_bytes(self, dtype: torch.dtype, flags: int, shape: torch.Size) -> int:
        """Return the bytes that a tensor takes in a message."""
        size = self.local_numel(flags, shape) * dtype.itemsize
        return size + -size % ALIGN  # the next multiple of ALIGN


class Sender:
    """The sending end of a link: it packs each tuple of tensors into one message and returns at once.

    `send` is for gradients, whose layout the receiver knows; `send_outputs` is for activations.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.bytes_sent = 0
        self._runs: defaultdict[int, LayoutRun] = defaultdict(LayoutRun)  # the current run of each chunk
        self._pending: deque[tuple[Any, Tensor]] = deque()  # (handle of a send, its buffer), oldest first

    def begin_step(self) -> None:
        """Forget the layouts of the last step."""
        self._runs.clear()

    def send(self, tensors: Sequence[BoundaryTensor]) -> None:
        """Start sending tensors as one message."""
        self._start_send(self._pack(tensors))

    def send_outputs(self, micro_chunk: MicroChunk, run_end: int, tensors: Sequence[BoundaryTensor], who: str) -> None:
        """Send the activations of a micro-batch, after a header if a run begins.

        run_end: the first later micro-batch whose layout may differ. Raises BoundaryError if the layout changes
        earlier. who: beginning of error messages, e.g. `stage 0`.
        """
        layout = layout_of(tensors)
        run = self._runs[micro_chunk.chunk]
        payload = self._pack(tensors)
        if micro_chunk.micro == run.end:  # the last run has ended, so a header announces the next one
            self._runs[micro_chunk.chunk] = LayoutRun(run_end, layout)
            run_length = run_end - micro_chunk.micro
            self._send_header([run_length, *_layout_as_json(layout)], who)
        elif layout != run.layout:
            raise BoundaryError(
                f"{who}: outputs of micro-batch {micro_chunk.micro} differ in number, shape, dtype or requires_grad "
                f"from those of the previous micro-batch, although the inputs have equal shapes; if output shapes "
                f"depend on the data, use PipelineModule(..., dynamic_shape=True)"
            )
        self._start_send(payload)

    def send_end(self) -> None:
        """Send a header that means the end of the data, in place of a step's first message; wait until it is sent."""
        self._send_header([0], "the end of the data")
        self.flush()

    def flush(self) -> None:
        """Wait until all sends have finished."""
        while self._pending:
            work, _buffer = self._pending.popleft()
            work.wait()

    def __str__(self) -> str:
        return f"to rank {self.link.peer}"

    def _start_send(self, buffer: Tensor | None, group: Any = None) -> None:
        """Start sending a buffer, if any, and keep it until it is sent. group: by default that of messages."""
        if buffer is None:
            return
        self.bytes_sent += buffer.nbytes
        trace.sent(buffer.nbytes)
        work = dist.isend(buffer, self.link.peer, group=group or self.link.group)
        self._pending.append((work, buffer))
        while self._pending and self._pending[0][0].is_completed():  # frees the buffers of finished sends
            self._pending.popleft()

    def _pack(self, tensors: Sequence[BoundaryTensor]) -> Tensor | None:
        """Return the bytes of a message; None if no tensor has elements.

        Several tensors are copied into one buffer. A single one is sent from its own memory, unless another tensor
        uses this memory and so could change it while it is sent.
        """
        present = [each for each in tensors if each.tensor.numel()]
        if not present:
            return None
        first = present[0].tensor
        is_shared = storage_use_count(first) > 1  # counted before `_local_bytes` makes views
        parts = list(map(self._local_bytes, present))
        if len(parts) > 1 or (is_shared and same_storage(parts[0], first)):  # a part in other memory is a copy already
            size = sum(part.numel() for part in parts)  # in bytes
            return torch.cat(parts, out=self.link.pool.take(size))
        return parts[0]

    def _send_header(self, content: list[Any], who: str) -> None:
        """Start sending `content`, the length of a run and a layout, as JSON padded with spaces to HEADER_SIZE."""
        text = json.dumps(content).encode()
        if len(text) > HEADER_SIZE:
            raise BoundaryError(f"{who}: {len(content) - 1} tensors are too many for one boundary; stack some of them")
        header = torch.frombuffer(bytearray(text.ljust(HEADER_SIZE)), dtype=torch.uint8)
        self._start_send(header, self.link.header_group)

    def _local_bytes(self, boundary_tensor: BoundaryTensor) -> Tensor:
        """Return the part of a tensor that this rank sends, as flat bytes padded to a multiple of ALIGN."""
        part = boundary_tensor.tensor.detach().contiguous().view(-1)
        link = self.link
        if boundary_tensor.is_split and link.slice_size > 1:
            length = link.local_numel(SPLIT, boundary_tensor.tensor.shape)  # on all ranks, e.g. 3 of 10 on each of 4
            begin = length * link.slice_rank
            part = part[begin : begin + length]
            part = torch.nn.functional.pad(part, (0, length - part.numel()))  # the last slices may be shorter
        raw_bytes = part.view(torch.uint8)
        padding = -raw_bytes.numel() % ALIGN  # e.g. 3 for 5 bytes
        return torch.nn.functional.pad(raw_bytes, (0, padding)) if padding else raw_bytes  # pad() always copies


class PostedReceive(NamedTuple):
    """A posted receive. micro_chunk: the message. work: handle. payload: buffer for the message."""

    micro_chunk: MicroChunk
    work: Any
    payload: Tensor
    layout: Layout


class Receiver:
    """The receiving end of a link: it posts receives of known layout in advance and returns messages in order.

    `take_inputs` reads the layout of activations from a header. `expect` sets the layout of gradients, which is
    the layout of the activations that this stage sent.

    A receive is posted before the stage needs its message. If `ahead` is a number (on a CPU), a receive is posted as
    soon as fewer than `ahead` receives are pending. If `ahead` is None, posting.py computes after which pass of the
    stage each receive is posted. The receive's buffer is allocated right after this pass, so that no allocation, which
    may synchronize the device, comes between two messages.
    """

    def __init__(self, link: Link, ahead: int | None) -> None:
        self.link = link
        self._ahead = ahead or 0  # receives to keep pending; 0 if `post_after` decides when each one is posted
        self.begin_step((), {})

    def begin_step(self, agenda: Iterable[MicroChunk], post_after: Mapping[MicroChunk, int]) -> None:
        """Prepare for the messages of a step.

        agenda: messages in the order in which they are sent. post_after: message -> how many passes this stage runs
        before it posts the receive; empty if the receiver's `ahead` decides when receives are posted.
        """
        self._post_after = post_after
        self._passes = 0
        self._reserved: dict[MicroChunk, Tensor] = {}  # buffers of receives that are not posted yet
        # For each message of the runs so far, the first later micro-batch whose layout may differ, according to the
        # sender. It is noted for each message, because the stage may have received headers of later runs.
        self.run_ends: dict[MicroChunk, int] = {}
        self._agenda = deque(agenda)  # messages without a posted receive, in the order of sending
        self._layouts: dict[MicroChunk, Layout | None] = {}  # layouts of these messages, once known
        self._posted: deque[PostedReceive] = deque()

    def expect(self, micro_chunk: MicroChunk, layout: Layout | None) -> None:
        """Set the layout of an expected message, so that it can be posted; None if it is empty and not sent."""
        self._layouts[micro_chunk] = layout
        self._reserve()

    def after_pass(self) -> None:
        """Count a pass of this stage, and allocate the buffers of the receives that are due after it."""
        self._passes += 1
        self._reserve()

    def post(self) -> None:
        """Post all receives that are due."""
        self._post(self._ahead)

    def take(self, micro_chunk: MicroChunk) -> list[BoundaryTensor]:
        """Wait for the message of `micro_chunk`. Raises RuntimeError if another message comes first."""
        self._post(min_pending=1)  # the receive of this message
        message = self._posted[0]  # removed after the wait, since `__str__` reports it while the stage waits
        if message.work is not None:  # else the message has no elements, so it is not sent
            message.work.wait()
        self._posted.popleft()
        self.post()  # so that `ahead` receives are pending again
        if message.micro_chunk != micro_chunk:
            raise RuntimeError(f"message {micro_chunk} was requested, but {message.micro_chunk} comes first")
        tensors = []
        begin = 0
        for dtype, flags, shape in message.layout:
            end = begin + self.link.message_bytes(dtype, flags, shape)  # tensors follow each other, with padding
            tensors.append(self._unpack(message.payload[begin:end], dtype, flags, shape))
            begin = end
        return tensors

    def take_inputs(self, micro_chunk: MicroChunk) -> list[BoundaryTensor]:
        """Wait for the activations of a micro-batch, and for the header before them if a run has ended.

        Raises DataEnded if the header means the end of the data.
        """
        if micro_chunk not in self.run_ends:
            self._receive_header(micro_chunk)
        return self.take(micro_chunk)

    def _receive_header(self, micro_chunk: MicroChunk) -> None:
        """Wait for the header of the run that begins at a micro-batch, and note the layout of the run's messages."""
        header = torch.empty(HEADER_SIZE, dtype=torch.uint8)
        dist.recv(header, self.link.peer, group=self.link.header_group)
        run_length, *tensors = json.loads(header.numpy().tobytes())  # e.g. 4, ["bfloat16", 1, [512, 2, 768]]
        if not run_length:  # `send_end` has sent this header
            raise DataEnded(f"the data of rank {self.link.peer} ended")
        layout = tuple((getattr(torch, dtype), flags, torch.Size(shape)) for dtype, flags, shape in tensors)
        end = micro_chunk.micro + run_length
        for micro in range(micro_chunk.micro, end):
            announced = MicroChunk(micro, micro_chunk.chunk)
            self._layouts[announced] = layout
            self.run_ends[announced] = end

    def __str__(self) -> str:
        """Describe the sending rank and the tensors of the next expected message."""
        layout = self._posted[0].layout if self._posted else ()
        tensors = ", ".join(f"{dtype} {list(shape)}" for dtype, _, shape in _layout_as_json(layout))
        colon = ": " if tensors else ""
        return f"from rank {self.link.peer}{colon}{tensors}"

    def _is_due(self, micro_chunk: MicroChunk) -> bool:
        """Return whether this stage has run the passes after which `post_after` lets it post the receive."""
        return self._post_after.get(micro_chunk, math.inf) <= self._passes  # never if `post_after` is empty

    def _reserve(self) -> None:
        """Allocate the buffers of the receives that are due and whose layout is known."""
        for micro_chunk in self._agenda:
            if micro_chunk not in self._layouts or not self._is_due(micro_chunk):
                return  # later messages have to wait, too
            layout = self._layouts[micro_chunk]
            if layout is not None and micro_chunk not in self._reserved:
                self._reserved[micro_chunk] = self._allocate(layout)

    def _allocate(self, layout: Layout) -> Tensor:
        return self.link.pool.take(sum(self.link.message_bytes(*each) for each in layout))

    def _post(self, min_pending: int) -> None:
        """Post receives of known layout: all that are due, then others until `min_pending` are pending."""
        while self._agenda and self._agenda[0] in self._layouts:
            micro_chunk = self._agenda[0]
            if len(self._posted) >= min_pending and not self._is_due(micro_chunk):
                return
            self._agenda.popleft()
            layout = self._layouts.pop(micro_chunk)
            if layout is None:  # nothing is sent
                continue
            payload = self._reserved.pop(micro_chunk, None)
            if payload is None:
                payload = self._allocate(layout)
            work = None
            if payload.numel():  # the sender skips a message without elements
                work = dist.irecv(payload, self.link.peer, group=self.link.group)
            self._posted.append(PostedReceive(micro_chunk, work, payload, layout))

    def _unpack(self, raw_bytes: Tensor, dtype: torch.dtype, flags: int, shape: torch.Size) -> BoundaryTensor:
        """Return a tensor from its bytes in a message, all-gathered if each tensor-parallel rank has a slice."""
        raw_bytes = raw_bytes[: self.link.local_numel(flags, shape) * dtype.itemsize]  # without the padding
        if raw_bytes.storage_offset() % dtype.itemsize:
            raw_bytes = raw_bytes.clone()  # tensors in a message begin at multiples of 8 bytes, but complex128 needs 16
        part = raw_bytes.view(dtype)
        if flags & SPLIT and self.link.slice_size > 1:
            part = torch.cat(gather_tensors(part, self.link.slice_group))
        # Cut off the padding of the last slices. Unlike a view, an alias has a version counter of its own.
        tensor = alias(part[: shape.numel()].view(shape))
        return BoundaryTensor(tensor, bool(flags & GRAD), bool(flags & SPLIT), bool(flags & BARE))


def _layout_as_json(layout: Layout) -> list[Any]:
    return [(str(dtype).removeprefix("torch."), flags, shape) for dtype, flags, shape in layout]
