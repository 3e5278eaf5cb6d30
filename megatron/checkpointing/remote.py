"""Checkpoints in object storage: reading of slices by byte ranges, and publication by writing checkpoint.json last."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..json_text import brief, is_list, parse_json
from ..storage import RemotePath, StorageError
from .files import INDEX
from .foreign import is_own
from .schema import is_count
from .stream import DTYPES

MAX_HEADER_BYTES = 100 << 20  # bytes of a header that safetensors accepts


class RemoteSlice:
    """A tensor in a safetensors file in object storage, with the interface of a safetensors slice."""

    def __init__(self, path: RemotePath, data_begin: int, entry: dict[str, Any]) -> None:
        self._path = path
        self._entry = entry
        self._data_begin = data_begin + entry["data_offsets"][0]

    def get_shape(self) -> list[int]:
        """Return the tensor's shape."""
        return list(self._entry["shape"])

    def get_dtype(self) -> str:
        """Return the dtype in the words of safetensors."""
        return str(self._entry["dtype"])

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        """Read a slice. Only the rows of the first dimension that it needs are read."""
        dtype = DTYPES[self.get_dtype()]
        shape = self.get_shape()
        rows, *other_slices = index  # a slice for each dimension
        first_row, end_row, _ = rows.indices(shape[0])
        row_bytes = torch.Size(shape[1:]).numel() * dtype.itemsize  # bytes of a row
        begin = self._data_begin + first_row * row_bytes
        end = self._data_begin + end_row * row_bytes
        data = self._path.read_range(begin, end)
        tensor = torch.empty(0, dtype=dtype)
        if data:  # torch.frombuffer refuses an empty buffer
            tensor = torch.frombuffer(bytearray(data), dtype=dtype)
        tensor = tensor.view(end_row - first_row, *shape[1:])
        return tensor[(slice(None), *other_slices)]  # its rows are already those of the slice


def _parse_header(header: bytes) -> dict[str, Any]:
    """Return the tensors that the header of a safetensors file lists. Raises ValueError if it is damaged."""
    entries: dict[str, Any] = parse_json(header.decode("utf-8"), "its header", dict)
    entries.pop("__metadata__", None)
    for name, entry in entries.items():
        is_valid = (
            isinstance(entry, dict)
            and isinstance(entry.get("dtype"), str)
            and is_list(entry.get("shape"), is_count)
            and is_list(entry.get("data_offsets"), is_count, 2)  # begin and end of the tensor's bytes
        )
        if not is_valid:
            raise ValueError(f"its header is damaged: {brief(repr(name))} has no dtype, shape and data_offsets")
    return entries


class RemoteTensors:
    """A safetensors file in object storage, of which only the header has been read. Raises ValueError if it is bad."""

    def __init__(self, path: RemotePath) -> None:
        size, _ = path.stamp()
        # The first 8 bytes of a safetensors file are the size of its header, which follows.
        header_size = int.from_bytes(path.read_range(0, 8), "little") if size >= 8 else 0
        if not 0 < header_size <= min(size - 8, MAX_HEADER_BYTES):
            raise ValueError("its header is damaged")
        self._entries = _parse_header(path.read_range(8, 8 + header_size))
        self._path = path
        self._data_begin = 8 + header_size
        # An entry has data_offsets [begin, end], so the largest end is the size of the data.
        data_size = max((entry["data_offsets"][1] for entry in self._entries.values()), default=0)
        expected_size = self._data_begin + data_size
        if size != expected_size:
            raise ValueError(f"it has {size} bytes, but its header requires {expected_size}")

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._entries)

    def get_slice(self, key: str) -> RemoteSlice:
        """Return a tensor of which no data has been read yet."""
        return RemoteSlice(self._path, self._data_begin, self._entries[key])


def delete_checkpoint(checkpoint: RemotePath) -> None:
    """Delete a checkpoint; its index goes first, so that a crash leaves no checkpoint that looks complete.

    Objects that no save has written stay.
    """
    (checkpoint / INDEX).unlink(missing_ok=True)
    for path in checkpoint.glob("*"):
        if is_own(path.name):
            path.unlink(missing_ok=True)


def upload_files(files: list[Path], folder: RemotePath) -> None:
    """Copy local files into a folder of object storage, then delete the local ones. Raises StorageError."""
    for path in files:
        target = folder / path.name
        size = path.stat().st_size
        target.upload(path)
        if target.stat().st_size != size:
            raise StorageError(f"{target} has {target.stat().st_size} bytes after the upload instead of {size}")
        path.unlink()
