"""Offloading of saved activations to host memory (Rhu et al. 2016).

Copies run concurrently with the computation, on one stream for each direction. While a layer's backward pass
runs, the activations of the layer before it are already being copied back. Storage that several tensors share
is copied once.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .._torch import base_of, version_counter

MIN_BYTES = 1 << 20  # bytes; smaller tensors are not worth a copy


class PendingCopy(NamedTuple):
    """Result of a copy in progress. wait: function that makes the device's current stream wait for the copy."""

    result: Tensor
    wait: Callable[[], None]


class CopyStream:
    """Copy stream of a device, separate from its compute stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.Stream(device)

    def to_host(self, source: Tensor) -> PendingCopy:
        """Copy `source` [bytes] from the device to pinned host memory, once the device has computed it."""
        self.stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self.stream:
            host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source, non_blocking=True)
        source.record_stream(self.stream)  # keeps the allocator from reusing the memory before the copy has read it
        return self._pending(host)

    def to_device(self, source: PendingCopy) -> PendingCopy:
        """Copy the result [bytes] of `source` from the host to the device, once `source` has arrived on the host."""
        with self.stream:
            source.wait()  # inside this block, the stream that waits is this one
            device_copy = source.result.to(self.device, non_blocking=True)
        return self._pending(device_copy)

    def _pending(self, result: Tensor) -> PendingCopy:
        """Return the copy whose result is written by the work that this stream has been given so far."""
        done = self.stream.record_event()

        def wait() -> None:
            current = torch.accelerator.current_stream(self.device)
            current.wait_event(done)
            if result.device == self.device:  # the allocator may reuse this memory only after the current stream
                result.record_stream(current)

        return PendingCopy(result, wait)


class CopyStreams:
    """Two copy streams: `down` to the host, `up` to the device. last: the layer that offloaded most recently."""

    def __init__(self, device: torch.device) -> None:
        self.down = CopyStream(device)
        self.up = CopyStream(device)
        self.last: weakref.ref[LayerActivations] | None = None


# Returns the copy streams of a device; each process creates them once and shares them among all layers.
copy_streams = cache(CopyStreams)


class OffloadedStorage:
    """Accelerator storage copied to the host.

    The storage is copied back once for all tensors in it. The copy on the device is freed after the last of these
    tensors has been requested.
    """

    def __init__(self, storage: torch.UntypedStorage, streams: CopyStreams) -> None:
        all_bytes = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # [bytes]
        self._upload_stream = streams.up
        self.host = streams.down.to_host(all_bytes)
        # Each tensor saved from this storage has a number. These are the numbers of the tensors not yet requested.
        self.unrequested: set[int] = set()
        self._device_copy: PendingCopy | None = None

    def fetch(self) -> PendingCopy:
        """Start copying the storage back to the device, unless this was started before; return the pending copy."""
        if self._device_copy is None:
            self._device_copy = self._upload_stream.to_device(self.host)
        return self._device_copy

    def request(self, tensor: int) -> torch.UntypedStorage:
        """Return the storage on the device for saved tensor number `tensor`; later computation waits for the copy."""
        device_copy = self.fetch()
        device_copy.wait()
        self.unrequested.discard(tensor)
        if not self.unrequested:
            self._device_copy = None
        return device_copy.result.untyped_storage()


class LayerActivations:
    """Offloaded activations that one layer saves for one micro-batch."""

    def __init__(self, streams: CopyStreams) -> None:
        self.streams = streams
        self.previous = streams.last
        self.storages: list[weakref.ref[OffloadedStorage]] = []
        self.in_backward = False

    def begin_backward(self) -> None:
        """Start copying back this layer's activations and then those of the layer before it, whose turn comes next."""
        if self.in_backward:  # each restored tensor calls this; the first one has started the copies
            return
        self.in_backward = True
        self.fetch()
        # None if this layer was the first to offload, or if the activations of the layer before it have been freed.
        previous = self.previous() if self.previous else None
        if previous is not None and not previous.in_backward:
            previous.fetch()

    def fetch(self) -> None:
        """Start copying back all storages that are still needed, beginning with the one saved last."""
        for reference in reversed(self.storages):
            storage = reference()
            if storage is not None:
                storage.fetch()


class OffloadedTensor(NamedTuple):
    """What autograd saves in place of an offloaded tensor: the offloaded storage, and the tensor's place in it."""

    layer: LayerActivations
    storage: OffloadedStorage
    number: int
    dtype: torch.dtype
    device: torch.device
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    def restore(self) -> Tensor:
        """Return the tensor [...] as it was saved, back on its device."""
        self.layer.begin_backward()
        memory = self.storage.request(self.number)
        return torch.empty(0, dtype=self.dtype, device=self.device).set_(memory, self.offset, self.shape, self.stride)


@contextmanager
def offloaded(training: bool = True) -> Iterator[None]:
    """Offload to pinned host memory what autograd saves inside the block, which must be one layer's forward pass.

    training: False to offload nothing.

    Weights, small tensors and tensors on the host are not offloaded. Raises RuntimeError at the end of the block if an
    offloaded tensor was changed in place.
    """
    if not training:
        yield
        return
    layer: LayerActivations | None = None
    # References to the saved tensors ensure that no address is reused.
    copied: dict[tuple[int, int], tuple[Tensor, OffloadedStorage]] = {}

    def pack(tensor: Tensor) -> Tensor | OffloadedTensor:
        nonlocal layer
        is_weight = isinstance(base_of(tensor), nn.Parameter)  # or a view of one
        if is_weight or tensor.nbytes < MIN_BYTES or not _is_accelerator(tensor.device):
            # An operation that saves its own output would refer to itself through the tensor. Such a cycle is freed by
            # a whole backward pass, but not by the two halves of zb-h1, which retain the graph.
            return tensor.detach()
        if layer is None:
            layer = LayerActivations(copy_streams(tensor.device))
        # Copy a storage once for all tensors in it, unless it was changed between two of them.
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), version_counter(tensor)
        if key not in copied:
            copied[key] = tensor.detach(), OffloadedStorage(storage, layer.streams)
            layer.storages.append(weakref.ref(copied[key][1]))
        storage_copy = copied[key][1]
        number = len(storage_copy.unrequested)  # new, because no tensor is requested before the backward pass
        storage_copy.unrequested.add(number)
        offset = int(tensor.storage_offset())
        return OffloadedTensor(
            layer, storage_copy, number, tensor.dtype, tensor.device, offset, tensor.shape, tensor.stride()
        )

    def unpack(saved: Tensor | OffloadedTensor) -> Tensor:
        return saved.restore() if isinstance(saved, OffloadedTensor) else saved

    with saved_tensors_hooks(pack, unpack):
        yield
    for (_, saved_version), (tensor, _) in copied.items():
        if version_counter(tensor) != saved_version:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} was changed in place after autograd had saved it, so "
                f"--offload-activations may have copied old or new values: replace the operation by one that is "
                f"not in place, or leave the flag out"
            )
    copied.clear()  # Free the saved tensors: autograd's graph keeps `pack` alive, and `pack` refers to `copied`.
    if layer is not None:
        layer.streams.last = weakref.ref(layer)


def _is_accelerator(device: torch.device) -> bool:
    return device.type != "cpu"
