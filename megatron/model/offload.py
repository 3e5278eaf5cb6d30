"""What a layer keeps for its backward pass waits in the host's memory, not in the accelerator's (Rhu et al. 2016).

Copies run beside the computation, in a queue for each direction. While a layer's backward pass runs, what the layer
before it has kept is on its way back already. Memory that several tensors look into is copied once.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .._torch import base_of, version

SMALLEST = 1 << 20  # bytes; less is not worth a copy


class Copied(NamedTuple):
    """The result of a copy that is under way. wait: lets what is computed from here on come after it."""

    result: Tensor
    wait: Callable[[], None]


class Lane:
    """A queue of copies on a device, beside that of its computations."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.Stream(device)

    def down(self, source: Tensor) -> Copied:
        """[bytes] of the device -> the same in pinned memory, after what computes `source`."""
        self.stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self.stream:
            host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source, non_blocking=True)
        source.record_stream(self.stream)  # or its memory would be given away before it is read
        return self._under_way(host)

    def up(self, source: Copied) -> Copied:
        """[bytes] of the host -> the same on the device, after `source` has come down."""
        with self.stream:
            source.wait()
            there = source.result.to(self.device, non_blocking=True)
        return self._under_way(there)

    def _under_way(self, result: Tensor) -> Copied:
        done = self.stream.record_event()

        def wait() -> None:
            now = torch.accelerator.current_stream(self.device)
            now.wait_event(done)
            if result.device == self.device:
                result.record_stream(now)

        return Copied(result, wait)


class Lanes:
    """Both queues of a device. last: the layer that kept something most recently."""

    def __init__(self, device: torch.device) -> None:
        self.down, self.up = Lane(device), Lane(device)
        self.last: weakref.ref[KeptByLayer] | None = None


@cache
def lanes(device: torch.device) -> Lanes:
    """Of this process on `device`."""
    return Lanes(device)


class Memory:
    """A piece of the accelerator's memory, on the host. It comes back once for all tensors in it, and goes when each was asked for."""

    def __init__(self, storage: torch.UntypedStorage, through: Lanes) -> None:
        everything = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # [bytes]
        self.up, self.host = through.up, through.down.down(everything)
        self.tensors: set[int] = set()  # that were kept of it and not asked for
        self._there: Copied | None = None

    def fetch(self) -> Copied:
        """Begin to bring it back, if that is not done."""
        if self._there is None:
            self._there = self.up.up(self.host)
        return self._there

    def asked_for(self, tensor: int) -> torch.UntypedStorage:
        """The memory, for what is computed from here on."""
        there = self.fetch()
        there.wait()
        self.tensors.discard(tensor)
        if not self.tensors:
            self._there = None
        return there.result.untyped_storage()


class KeptByLayer:
    """What one layer keeps of one micro-batch."""

    def __init__(self, through: Lanes) -> None:
        self.through, self.before = through, through.last
        self.memories: list[weakref.ref[Memory]] = []
        self.begun = False

    def begin_backward(self) -> None:
        """Its own memory is needed now, that of the layer before it next."""
        if self.begun:
            return
        self.begun = True
        self.fetch()
        before = self.before() if self.before else None
        if before is not None and not before.begun:
            before.fetch()

    def fetch(self) -> None:
        """Begin to bring back what is still wanted, the newest first."""
        for each in reversed(self.memories):
            memory = each()
            if memory is not None:
                memory.fetch()


class Kept(NamedTuple):
    """A tensor that is elsewhere."""

    layer: KeptByLayer
    memory: Memory
    number: int
    dtype: torch.dtype
    device: torch.device
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    def back(self) -> Tensor:
        """The tensor [...] on its device again, as it was."""
        self.layer.begin_backward()
        storage = self.memory.asked_for(self.number)
        return torch.empty(0, dtype=self.dtype, device=self.device).set_(storage, self.offset, self.shape, self.stride)


@contextmanager
def offloaded() -> Iterator[None]:
    """Within, which is one layer's forward pass, autograd keeps what it saves in pinned memory of the host; weights, and what is there already, stay.

    Raises RuntimeError at the end if something was changed in place that was on its way.
    """
    layer: KeptByLayer | None = None
    copied: dict[tuple[int, int], tuple[Tensor, Memory]] = {}  # held, so that no address is used twice

    def away(tensor: Tensor) -> Tensor | Kept:
        nonlocal layer
        if _stays(tensor):
            return tensor
        if layer is None:
            layer = KeptByLayer(lanes(tensor.device))
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), version(tensor)
        if key not in copied:
            copied[key] = tensor.detach(), Memory(storage, layer.through)
            layer.memories.append(weakref.ref(copied[key][1]))
        memory = copied[key][1]
        number = len(memory.tensors)
        memory.tensors.add(number)
        offset = int(tensor.storage_offset())
        return Kept(layer, memory, number, tensor.dtype, tensor.device, offset, tensor.shape, tensor.stride())

    with saved_tensors_hooks(away, lambda kept: kept.back() if isinstance(kept, Kept) else kept):
        yield
    for (_, before), (tensor, _) in copied.items():
        if version(tensor) != before:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} was changed in place after autograd had kept it, and --offload-activations may "
                f"have copied either: compute it out of place, or leave the flag out"
            )
    copied.clear()  # `away` lives on in the graph
    if layer is not None:
        layer.through.last = weakref.ref(layer)


def _stays(tensor: Tensor) -> bool:
    return isinstance(base_of(tensor), nn.Parameter) or tensor.nbytes < SMALLEST or not _is_elsewhere(tensor.device)


def _is_elsewhere(device: torch.device) -> bool:
    return device.type != "cpu"
