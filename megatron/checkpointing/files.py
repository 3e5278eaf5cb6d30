"""The files of a checkpoint: atomic publication, and lookup of the newest checkpoint."""

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..atomic import absence, write_text
from ..json_text import read_json
from ..storage import RemotePath, to_path
from .checksums import BLAKE3, SHA256, Checksum, checksum_of

INDEX = "checkpoint.json"
TENSORS = ".safetensors"
FORMAT = 3
WEIGHT = "weight"  # a weight has the key `weight.<parameter>`, an optimizer moment the key `<moment>.<parameter>`
BUFFER = "buffer"  # a persistent buffer has the key `buffer.<name>`
_LATEST = re.compile(r"(?P<name>[^\n/]+)(\n(?P<sums>[0-9a-f]{64})?\n?)?")


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or belongs to another model; the message names its path."""


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def temporary_of(final: Path) -> Path:
    """Return the folder to write a checkpoint to; in object storage, where nothing can be renamed, its final one."""
    return final if isinstance(final, RemotePath) else final.with_name(final.name + ".tmp")


def publish(final: Path, temporary: Path, index: str, checksum: Checksum, sums: Mapping[str, str]) -> None:
    """Turn the folder `temporary` of written tensors into the checkpoint `final`, and make `latest` name `final`.

    If an earlier checkpoint exists, a crash at any moment leaves at least one complete checkpoint, and `latest` names
    it. There is one exception: if this iteration had been saved before, a crash between the two renames leaves that
    checkpoint under a temporary name, and a crash after them leaves `latest` with its checksum. `recover` mends both.
    index: text of checkpoint.json.
    sums: the checksum of each tensor file in `temporary`, by name.
    """
    write_text(temporary / INDEX, index, synced=True)
    every = {INDEX: checksum.of(temporary / INDEX), **sums}
    write_text(temporary / checksum.file, sums_text(every), synced=True)
    sync(temporary)
    old = aside(final)
    from .foreign import keep_foreign

    keep_foreign(final)
    if final.exists():  # there is an earlier save of this iteration
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    temporary.rename(final)
    sync(final.parent)
    point_latest_to(final)
    shutil.rmtree(old, ignore_errors=True)


def sums_text(sums: Mapping[str, str]) -> str:
    """Return the text of the checksum file. sums: checksum of each file, by name."""
    return "".join(f"{sums[name]}  {name}\n" for name in sorted(sums))


def point_latest_to(checkpoint: Path) -> None:
    """Write the name of a complete checkpoint into the file `latest` next to it."""
    folder = checkpoint.parent
    content = f"{checkpoint.name}\n{SHA256.of(sums_file(checkpoint))}\n"
    if isinstance(folder, RemotePath):
        (folder / "latest").write_bytes(content.encode())
        return
    write_text(folder / "latest", content, synced=True, temporary=folder / "latest.tmp")
    sync(folder)


def sums_file(checkpoint: Path) -> Path:
    """Return the path of the file with the checksums of a checkpoint's other files."""
    return checkpoint / checksum_of(checkpoint).file


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is a checkpoint; in object storage, the index shows that the upload has finished."""
    return path.name[5:].isdigit() and sums_file(path).is_file() and (path / INDEX).is_file()


def aside(checkpoint: Path) -> Path:
    """Return the name under which an earlier save of the same iteration waits until the new one is published."""
    return checkpoint.with_name(checkpoint.name + ".old.tmp")


def latest_name(folder: Path) -> str | None:
    """Return the first line of the file `latest`, the name of a checkpoint; None if there is no such file."""
    pointer = folder / "latest"
    return pointer.read_bytes().decode("utf-8", "replace").split("\n")[0] if pointer.is_file() else None


def numbered_checkpoints(folder: Path) -> dict[int, Path]:
    """Return iteration -> checkpoint in `folder`, damaged or not, in ascending order."""
    found = {int(path.name[5:]): path for path in folder.glob("iter_*") if path.name[5:].isdigit()}
    return dict(sorted(found.items()))


def way_back(checkpoint: Path) -> str:
    """Return how to resume without an unreadable checkpoint: from the newest before it, else from the newest other."""
    folder = checkpoint.parent
    others = [path.name for path in numbered_checkpoints(folder).values() if is_checkpoint(path)]
    if checkpoint.name in others:
        others.remove(checkpoint.name)
    choices = [name for name in others if name < checkpoint.name] or others
    if not choices:
        return f"{folder} has no other checkpoint; restore it from a copy"
    return f"to resume from {choices[-1]}, write its name into {folder / 'latest'}"


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint that `latest` names, None if there is no checkpoint yet.

    Raises CheckpointError if `latest` is damaged, if it names a checkpoint that does not exist, or if there are
    checkpoints but no `latest`. If a user writes `latest` by hand, the checksum may be omitted.
    """
    pointer = folder / "latest"
    if not pointer.is_file():
        _refuse_missing_pointer(pointer)
        return None
    content = pointer.read_bytes()
    found = _LATEST.fullmatch(content.decode("utf-8", "replace"))
    if not found or found["name"] in (".", "..") or not found["name"].isprintable():
        raise CheckpointError(f"{pointer} is damaged; {way_back(pointer)}")
    path = folder / found["name"]
    if not path.is_dir():
        if pointer.read_bytes() != content:  # a run has saved and deleted meanwhile
            return latest_checkpoint(folder)
        what = "is a file" if path.is_file() else absence(path)
        raise CheckpointError(f"{pointer} names {path.name}, but {path} {what}; {way_back(path)}")
    sums = sums_file(path)
    if found["sums"] and sums.is_file() and SHA256.of(sums) != found["sums"]:
        check = {BLAKE3.file: "b3sum -c", SHA256.file: "sha256sum -c"}[sums.name]
        raise CheckpointError(
            f"the checksum in {pointer} is not that of {sums}: one of the two files is damaged; "
            f"if `{check} {sums.name}` finds no error in {path.name}, "
            f"write only the name {path.name} into latest; otherwise, {way_back(path)}"
        )
    return path


def _refuse_missing_pointer(pointer: Path) -> None:
    """Raise CheckpointError if there are checkpoints beside the missing file `latest`, or if it is a folder."""
    if pointer.is_dir():
        raise CheckpointError(f"{pointer} is a folder, but must be a file: remove it; {way_back(pointer)}")
    whole = sorted(path.name for path in pointer.parent.glob("iter_*") if is_checkpoint(path))
    if whole:
        raise CheckpointError(
            f"the file {pointer} is missing; to resume from {whole[-1]}, create {pointer} with the text {whole[-1]}"
        )


def saved_to(run_dir: Path) -> Path | None:
    """Return the place of --save that the settings in a run directory name; None without --save or settings."""
    if isinstance(run_dir, RemotePath):
        return None
    try:
        saved = read_json(run_dir / "config.json", dict)["checkpoint"]["save"]
        return to_path(saved) if saved else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def find_checkpoint(load: str) -> Path:
    """Return the checkpoint at `load`, or the newest checkpoint if `load` is a run directory or a checkpoint folder.

    The checkpoints of a run directory may lie elsewhere, where the run's --save put them.
    """
    home = to_path(load)
    folders = [home / "checkpoints", home]
    elsewhere = saved_to(home)
    if elsewhere:
        folders.append(elsewhere)
    for folder in folders:
        if sums_file(folder).is_file() or (folder / INDEX).is_file():
            return folder
        path = latest_checkpoint(folder)
        if path:
            return path
    raise CheckpointError(f"--load {load} holds no checkpoint")


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
