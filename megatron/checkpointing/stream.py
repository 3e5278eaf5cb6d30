"""Writing of safetensors files tensor by tensor, so that one at a time is in memory; opening of such files."""

import json
import os
import struct
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..storage import RemotePath
from .checksums import Checksum
from .files import CheckpointError

# Dtype names of safetensors: FLOAT_CODES are the dtypes of moments, DTYPE_CODES those of weights and buffers.
FLOAT_CODES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
DTYPE_CODES = FLOAT_CODES | {
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


def as_stored(buffer: Tensor) -> Tensor:
    """Return a view of `buffer` as stored in a file: a scalar as [1], a complex tensor as real numbers [..., 2]."""
    real = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    return real if real.dim() else real.view(1)


def stored_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype in which a checkpoint holds a weight: fp64 or fp32, or the weight's own if it holds integers."""
    is_kept = weight.dtype == torch.float64 or not weight.is_floating_point()
    return weight.dtype if is_kept else torch.float32


@dataclass(frozen=True)
class Slot:
    """Name, shape and dtype of a tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in the file, in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class LazyTensor(Slot):
    """A tensor to be written; `build` builds the tensor just before it is written."""

    build: Callable[[], Tensor]


class StreamWriter:
    """Writer of a safetensors file whose tensors are declared in advance and then added one by one.

    The file consists of the header's length, the header in JSON, and the tensors without gaps. Use the writer as a
    context manager; afterwards, `checksum` is the file's checksum. Raises OSError if writing fails.
    """

    def __init__(self, path: Path, slots: Iterable[Slot], checksum: Checksum) -> None:
        self._slots = list(slots)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for slot in self._slots:
            end = offset + slot.num_bytes
            code = DTYPE_CODES[slot.dtype]
            header[slot.name] = {"dtype": code, "shape": list(slot.shape), "data_offsets": [offset, end]}
            offset = end
        header_bytes = json.dumps(header).encode()
        # The format asks for tensors aligned to 8 bytes: 13 bytes of header get 3 spaces.
        header_bytes += b" " * (-len(header_bytes) % 8)
        self._digest = checksum.new_hash()  # hashing with several threads would slow writing down
        # One thread hashes and one flushes to disk while this thread writes.
        self._hasher = ThreadPoolExecutor(1)
        self._syncer = ThreadPoolExecutor(1)
        self._synced = Future[None]()  # the last fdatasync in the background; at first, none is running
        self._synced.set_result(None)
        self._file = open(path, "wb")  # noqa: SIM115  # closed by __exit__
        self._next_slot = 0
        self._write_block(struct.pack("<Q", len(header_bytes)) + header_bytes)  # <Q: 8 bytes, little-endian

    def _write_block(self, block: bytes | memoryview) -> None:
        """Write and hash a block, and let the disk begin to write what the file has so far."""
        # Hash in parallel with writing.
        hashed = self._hasher.submit(self._digest.update, block)
        self._file.write(block)
        hashed.result()  # the hash needs the blocks in order, and the memory of `block` may change after this call
        if self._synced.done():  # else the disk is still busy with earlier blocks; the next flush includes this one
            self._synced.result()  # raises its OSError, which a later fdatasync would not report again
            self._synced = self._syncer.submit(os.fdatasync, self._file.fileno())  # the disk writes in the background

    def add(self, name: str, value: Tensor) -> None:
        """Write the next declared tensor. Raises ValueError if its name or shape differs from the declaration."""
        slot = self._slots[self._next_slot]
        if name != slot.name or tuple(value.shape) != slot.shape:
            raise ValueError(
                f"got {name} of shape {list(value.shape)}, but the next declared tensor is {slot.name} of shape "
                f"{list(slot.shape)}"
            )
        self._next_slot += 1
        values = value.detach().to("cpu", slot.dtype).contiguous().view(-1)
        if values.numel():
            # numpy has no bfloat16, so the tensor is viewed as bytes first; `data` gives them without a copy.
            self._write_block(values.view(torch.uint8).numpy().data)

    def __enter__(self) -> "StreamWriter":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._hasher.shutdown()
            self._syncer.shutdown()
            self._file.close()

    def _finish(self) -> None:
        if self._next_slot != len(self._slots):
            raise ValueError(f"{self._slots[self._next_slot].name} was declared but not written")
        self._file.flush()
        self._synced.result()
        os.fsync(self._file.fileno())

    @property
    def checksum(self) -> str:
        """Checksum of the bytes written so far, in hexadecimal."""
        return str(self._digest.hexdigest())


def write_tensor_file(path: Path, entries: Iterable[LazyTensor], checksum: Checksum) -> str:
    """Write `entries` to the safetensors file `path`, one tensor after another; return the file's checksum."""
    entries = list(entries)
    with StreamWriter(path, entries, checksum) as writer:
        for entry in entries:
            writer.add(entry.name, entry.build())
    return writer.checksum


def open_tensors(path: Path) -> Any:
    """Open a safetensors file for reading tensors by name. Raises CheckpointError."""
    try:
        if not isinstance(path, RemotePath):
            return safe_open(str(path), framework="pt")
        from .remote import RemoteTensors

        return RemoteTensors(path)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        if _begins_with(path, b"version https://git-lfs"):
            raise CheckpointError(
                f"{path} is a Git LFS pointer instead of the file's content: run git lfs pull in its folder"
            ) from None
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _begins_with(path: Path, head: bytes) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return bool(file.read(len(head)) == head)
