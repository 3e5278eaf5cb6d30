"""The files of a checkpoint: atomic publication, lookup, and detection of damage."""

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..atomic import remove, write_text

SUMS = "SHA256SUMS"
INDEX = "checkpoint.json"
FORMAT = 3
WEIGHT = "weight"  # keys of weights are `weight.<parameter>`, those of the optimizer's moments `<moment>.<parameter>`
BUFFER = "buffer"  # keys of persistent buffers are `buffer.<name>`
_LATEST = re.compile(r"(?P<name>[^\n/]+)(\n(?P<sums>[0-9a-f]{64})?\n?)?")


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or belongs to another model; the message says which one and where."""


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ------------------------------------------------------------------------------------ writing


def publish(final: Path, temporary: Path, index: str, sums: Mapping[str, str]) -> None:
    """Turn a folder of written tensors into the checkpoint `final`, and update `latest` to name it.

    If an earlier checkpoint exists, a crash at any moment leaves a complete one that `latest` names or that `recover`
    can restore.
    index: text of checkpoint.json.
    sums: SHA-256 of every other file.
    """
    write_text(temporary / INDEX, index, synced=True)
    every = {INDEX: sha256_of(temporary / INDEX), **sums}
    write_text(temporary / SUMS, "".join(f"{every[name]}  {name}\n" for name in sorted(every)), synced=True)
    sync(temporary)
    old = _aside(final)
    if final.exists():  # this iteration was saved before
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    temporary.rename(final)
    sync(final.parent)
    point_latest_to(final)
    shutil.rmtree(old, ignore_errors=True)


def point_latest_to(checkpoint: Path) -> None:
    """Update the `latest` file beside a complete checkpoint to name it."""
    folder = checkpoint.parent
    content = f"{checkpoint.name}\n{sha256_of(checkpoint / SUMS)}\n"
    write_text(folder / "latest", content, synced=True, temporary=folder / "latest.tmp")
    sync(folder)


def _aside(checkpoint: Path) -> Path:
    return checkpoint.with_name(checkpoint.name + ".old.tmp")


def recover(folder: Path) -> None:
    """Restore a checkpoint that a crash left under its temporary name, if `latest` still names it."""
    name = latest_name(folder) if folder.is_dir() else None
    if name is not None and not (folder / name).exists() and _aside(folder / name).is_dir():
        _aside(folder / name).rename(folder / name)


def clear(folder: Path) -> None:
    """Delete the half-written checkpoints that a crash has left."""
    for left in [*folder.glob("iter_*.tmp"), folder / "latest.tmp"]:
        with contextlib.suppress(OSError):  # an unwritable folder is reported when the run saves
            remove(left)


# ------------------------------------------------------------------------------------ finding


def latest_name(folder: Path) -> str | None:
    """Return the first line of the file `latest`, the name of a checkpoint; None if there is no such file."""
    pointer = folder / "latest"
    return pointer.read_bytes().decode("utf-8", "replace").split("\n")[0] if pointer.is_file() else None


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint that `latest` names, None if there is no checkpoint yet.

    Raises CheckpointError if `latest` is damaged, if it names a checkpoint that does not exist, or if there are
    checkpoints but no `latest`. A `latest` written by hand may contain only the name.
    """
    pointer = folder / "latest"
    if not pointer.exists():
        whole = sorted(path.parent.name for path in folder.glob(f"iter_*/{SUMS}") if path.parent.name[5:].isdigit())
        if whole:
            raise CheckpointError(
                f"{pointer} is missing next to {whole[-1]}; write that name into it to resume from there"
            )
        return None
    found = _LATEST.fullmatch(pointer.read_bytes().decode("utf-8", "replace"))
    if not found or found["name"] in (".", ".."):
        raise CheckpointError(f"{pointer} is damaged; write the name of the checkpoint to resume from into it")
    path = folder / found["name"]
    if not path.is_dir():
        raise CheckpointError(f"{pointer} names {path.name}, but there is no checkpoint of that name next to it")
    if found["sums"] and (path / SUMS).is_file() and sha256_of(path / SUMS) != found["sums"]:
        raise CheckpointError(
            f"{pointer} and {path / SUMS} do not belong together: one of them is damaged; if the other files agree "
            "with "
            f"`sha256sum -c {SUMS}`, write {path.name} into latest"
        )
    return path


def find_checkpoint(load: str) -> Path:
    """Return the checkpoint that `load` names: a checkpoint itself, or the newest one in a run or checkpoint folder."""
    for folder in (Path(load) / "checkpoints", Path(load)):
        if (folder / SUMS).is_file() or (folder / INDEX).is_file():
            return folder
        path = latest_checkpoint(folder)
        if path:
            return path
    raise CheckpointError(f"--load {load} holds no checkpoint")


# ----------------------------------------------------------------------------------- checking


def read_sums(checkpoint: Path) -> dict[str, str]:
    """Return the SHA-256 of each file by name, from SHA256SUMS. Raises CheckpointError."""
    path = checkpoint / SUMS
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    sums = {}
    for number, line in enumerate(path.read_bytes().decode("utf-8", "replace").split("\n")[:-1], 1):
        found = re.fullmatch(r"([0-9a-f]{64})  ([^/]+)", line)
        if not found or found[2] in (".", "..") or found[2] in sums:
            raise CheckpointError(f"{path}, line {number} is damaged")
        sums[found[2]] = found[1]
    if INDEX not in sums:
        raise CheckpointError(f"{path} does not list {INDEX}: it is damaged")
    return sums


def _begins_with(path: Path, head: bytes) -> bool:
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(len(head)) == head


def open_tensors(path: Path) -> Any:
    """Open a safetensors file for reading tensors by name. Raises CheckpointError."""
    try:
        return safe_open(str(path), framework="pt")
    except (OSError, SafetensorError) as error:
        if _begins_with(path, b"version https://git-lfs"):
            raise CheckpointError(
                f"{path} is a pointer of Git LFS, not the file itself: run git lfs pull in its folder"
            ) from None
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def check_file(path: Path, expected: str) -> None:
    """Raise CheckpointError if a file is missing or its checksum differs."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    if sha256_of(path) != expected:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one that {SUMS} has")
