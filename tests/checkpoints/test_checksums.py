"""The checksums of checkpoint files: known values, the fallback without blake3, and errors of the disk."""

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpointing import CheckpointError, CheckpointReader
from megatron.checkpointing.checksums import BLAKE3, SHA256, Checksum
from megatron.checkpointing.stream import LazyTensor, Slot, StreamWriter
from megatron.checkpointing.write import write_checkpoint
from megatron.config.command_line import parse

# Official test vectors: for BLAKE3, the input is the bytes 0 to 250, repeated.
KNOWN: list[tuple[Checksum, bytes, str]] = [
    (BLAKE3, b"", "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"),
    (BLAKE3, b"\0", "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213"),
    (SHA256, b"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
]


@pytest.mark.parametrize(("checksum", "content", "expected"), KNOWN)
def test_known_values(checksum: Checksum, content: bytes, expected: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    assert checksum.hash_file(tmp_path / "x") == expected


@pytest.mark.parametrize("checksum", [BLAKE3, SHA256], ids=["BLAKE3", "SHA-256"])
def test_a_file_in_blocks_has_the_checksum_of_its_content(checksum: Checksum, tmp_path: Path) -> None:
    """The checksum does not depend on the blocks in which a file is read or written, nor on the number of threads."""
    content = os.urandom(40_000_003)
    (tmp_path / "x").write_bytes(content)
    at_once = checksum.new_hash()
    at_once.update(content)
    assert checksum.hash_file(tmp_path / "x") == at_once.hexdigest()
    with StreamWriter(tmp_path / "y", [Slot(str(i), (1000, i), torch.float32) for i in range(3)], checksum) as writer:
        for i in range(3):
            writer.add(str(i), torch.full((1000, i), float(i)))
    assert writer.checksum == checksum.hash_file(tmp_path / "y")


def _write(folder: Path) -> Path:
    entry = LazyTensor("weight.x", (2, 2), torch.float32, lambda: torch.ones(2, 2))
    write_checkpoint(folder / "iter_0000000", [entry], parse([]), "")
    return folder / "iter_0000000"


def test_without_blake3_checkpoints_have_sha256(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints with BLAKE3 and with SHA-256 checksums can be read, and damage to either is found."""
    new = _write(tmp_path / "new")
    monkeypatch.setitem(sys.modules, "blake3", None)
    old = _write(tmp_path / "old")
    monkeypatch.undo()
    assert (new / "BLAKE3SUMS").is_file() and (old / "SHA256SUMS").is_file()
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="needs the package blake3"):
        patch.setitem(sys.modules, "blake3", None)
        CheckpointReader(new)
    for path in (new, old):
        CheckpointReader(path).verify()
        file = path / "weights.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\1")
        with pytest.raises(CheckpointError, match=r"weights\.safetensors"):
            CheckpointReader(path).verify()


@pytest.mark.parametrize("call", ["fdatasync", "fsync"])
def test_an_error_of_the_disk_ends_the_save(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If fdatasync in the background or the final fsync fails, the save raises the error and leaves no checkpoint."""

    def fails(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(OSError, match="Input/output error"):
        _write(tmp_path)
    assert not (tmp_path / "iter_0000000").exists()


@pytest.mark.parametrize("checksum", [BLAKE3, SHA256], ids=["BLAKE3", "SHA-256"])
def test_a_file_that_cannot_be_read_is_named(checksum: Checksum, tmp_path: Path) -> None:
    """The package blake3 raises errors without the file's name."""
    folder = tmp_path / "x"
    folder.mkdir()
    with pytest.raises(OSError, match=str(folder)):
        checksum.hash_file(folder)
