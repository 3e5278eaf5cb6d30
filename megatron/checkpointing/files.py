"""The files of a checkpoint: atomic publication, lookup, and detection of damage."""

import contextlib
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..atomic import remove, write_text
from ..json_text import read_json
from ..storage import RemotePath, place
from .checksums import BLAKE3, SHA256, Checksum, checksum_of
from .remote import RemoteTensors, delete, delete_incomplete

INDEX = "checkpoint.json"
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


# ------------------------------------------------------------------------------------ writing


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
    write_text(temporary / checksum.file, "".join(f"{every[name]}  {name}\n" for name in sorted(every)), synced=True)
    sync(temporary)
    old = _aside(final)
    if final.exists():  # there is an earlier save of this iteration
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    temporary.rename(final)
    sync(final.parent)
    point_latest_to(final)
    shutil.rmtree(old, ignore_errors=True)


def publish_remote(final: RemotePath, index: str, checksum: Checksum, sums: Mapping[str, str]) -> None:
    """Turn the uploaded tensor files in `final` into a checkpoint, and make `latest` name it.

    The checkpoint counts as one as soon as checkpoint.json, which is written last, is there.
    """
    data = index.encode()
    digest = checksum.new()
    digest.update(data)
    every = {INDEX: digest.hexdigest(), **sums}
    (final / checksum.file).write_bytes("".join(f"{every[name]}  {name}\n" for name in sorted(every)).encode())
    (final / INDEX).write_bytes(data)
    point_latest_to(final)
    for copy in final.parent.glob("iter_*.old.tmp"):  # see make_room
        delete(copy, INDEX)


def make_room(final: RemotePath) -> None:
    """Delete what is at `final`, such as an earlier save of the same iteration.

    If `latest` names this checkpoint, it first gets the name of the newest of the other complete ones. If there is no
    other one, this checkpoint is copied, so that a run can always resume; `publish_remote` deletes the copy.
    """
    folder = final.parent
    if latest_name(folder) == final.name:
        others = [path for path in folder.glob("iter_*") if path != final and _is_checkpoint(path)]
        point_latest_to(others[-1] if others else _copy_aside(final))
    delete(final, INDEX)


def _copy_aside(checkpoint: RemotePath) -> RemotePath:
    copy = checkpoint.with_name(checkpoint.name + ".old.tmp")
    delete(copy, INDEX)
    for path in sorted(checkpoint.glob("*"), key=lambda path: path.name == INDEX):  # the index is copied last
        path.copy_to(copy / path.name)
    return copy


def discard(checkpoint: Path) -> None:
    """Delete a half-written checkpoint as far as possible; errors are ignored.

    In object storage, it has its final name. So it is kept if it is complete, as after an error in make_room.
    """
    if isinstance(checkpoint, RemotePath):
        with contextlib.suppress(OSError):
            if not (checkpoint / INDEX).is_file():
                delete(checkpoint, INDEX)
    else:
        shutil.rmtree(checkpoint, ignore_errors=True)


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


def _is_checkpoint(path: Path) -> bool:
    """Return whether a folder is a checkpoint; in object storage, the index shows that the upload has finished."""
    return path.name[5:].isdigit() and sums_file(path).is_file() and (path / INDEX).is_file()


def _aside(checkpoint: Path) -> Path:
    return checkpoint.with_name(checkpoint.name + ".old.tmp")


def recover(folder: Path) -> None:
    """Undo what a crash has left when it interrupted another save of the iteration that `latest` names.

    It has left the earlier save under a temporary name (.old.tmp). If the new save is complete, `latest` has the
    checksum of the earlier one.
    """
    if isinstance(folder, RemotePath):  # there, nothing is renamed
        return
    name = latest_name(folder) if folder.is_dir() else None
    if name is None or not _aside(folder / name).is_dir():
        return
    final = folder / name
    old = _aside(folder / name)
    if not final.exists():
        old.rename(final)
    elif sums_file(old).is_file() and SHA256.of(sums_file(old)) in (folder / "latest").read_text("utf-8", "replace"):
        point_latest_to(final)


def clear(folder: Path) -> None:
    """Delete the half-written checkpoints that a crash has left."""
    if isinstance(folder, RemotePath):
        delete_incomplete(folder, INDEX)
        return
    for left in [*folder.glob("iter_*.tmp"), folder / "latest.tmp"]:
        with contextlib.suppress(OSError):  # if the folder cannot be written, the first save reports it
            remove(left)


# ------------------------------------------------------------------------------------ finding


def latest_name(folder: Path) -> str | None:
    """Return the first line of the file `latest`, the name of a checkpoint; None if there is no such file."""
    pointer = folder / "latest"
    return pointer.read_bytes().decode("utf-8", "replace").split("\n")[0] if pointer.is_file() else None


def numbered_checkpoints(folder: Path) -> dict[int, Path]:
    """Return iteration -> checkpoint in `folder`, damaged or not, in ascending order."""
    paths = [path for path in folder.glob("iter_*") if path.name[5:].isdigit()]
    return {int(path.name[5:]): path for path in sorted(paths, key=lambda path: int(path.name[5:]))}


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint that `latest` names, None if there is no checkpoint yet.

    Raises CheckpointError if `latest` is damaged, if it names a checkpoint that does not exist, or if there are
    checkpoints but no `latest`. If a user writes `latest` by hand, the checksum may be omitted.
    """
    pointer = folder / "latest"
    if not pointer.exists():
        whole = sorted(path.name for path in folder.glob("iter_*") if _is_checkpoint(path))
        if whole:
            raise CheckpointError(
                f"the file {pointer} is missing; to resume from {whole[-1]}, create {pointer} with the text {whole[-1]}"
            )
        return None
    content = pointer.read_bytes()
    found = _LATEST.fullmatch(content.decode("utf-8", "replace"))
    if not found or found["name"] in (".", ".."):
        raise CheckpointError(f"{pointer} is damaged; write the name of the checkpoint to resume from into this file")
    path = folder / found["name"]
    if not path.is_dir():
        if pointer.read_bytes() != content:  # a run has saved and deleted meanwhile
            return latest_checkpoint(folder)
        raise CheckpointError(f"{pointer} names {path.name}, but there is no checkpoint of that name in its folder")
    sums = sums_file(path)
    if found["sums"] and sums.is_file() and SHA256.of(sums) != found["sums"]:
        check = {BLAKE3.file: "b3sum -c", SHA256.file: "sha256sum -c"}[sums.name]
        raise CheckpointError(
            f"the checksum in {pointer} is not that of {sums}: one of the two files is damaged; "
            f"if `{check} {sums.name}` finds no error in {path.name}, "
            f"write only the name {path.name} into latest"
        )
    return path


def saved_to(run_dir: Path) -> Path | None:
    """Return the place of --save that the settings in a run directory name; None without --save or settings."""
    if isinstance(run_dir, RemotePath):
        return None
    try:
        saved = read_json(run_dir / "config.json", dict)["checkpoint"]["save"]
        return place(saved) if saved else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def find_checkpoint(load: str) -> Path:
    """Return the checkpoint at `load`, or the newest checkpoint if `load` is a run directory or a checkpoint folder.

    The checkpoints of a run directory may lie elsewhere, where the run's --save put them.
    """
    home = place(load)
    elsewhere = saved_to(home)
    for folder in (home / "checkpoints", home, *([elsewhere] if elsewhere else [])):
        if sums_file(folder).is_file() or (folder / INDEX).is_file():
            return folder
        path = latest_checkpoint(folder)
        if path:
            return path
    raise CheckpointError(f"--load {load} holds no checkpoint")


# ----------------------------------------------------------------------------------- checking


def read_sums(checkpoint: Path) -> dict[str, str]:
    """Read the checksum file and return the checksum of each file, by name. Raises CheckpointError."""
    path = sums_file(checkpoint)
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
    with path.open("rb") as file:
        return bool(file.read(len(head)) == head)


def open_tensors(path: Path) -> Any:
    """Open a safetensors file for reading tensors by name. Raises CheckpointError."""
    try:
        return RemoteTensors(path) if isinstance(path, RemotePath) else safe_open(str(path), framework="pt")
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        if _begins_with(path, b"version https://git-lfs"):
            raise CheckpointError(
                f"{path} is a Git LFS pointer instead of the file's content: run git lfs pull in its folder"
            ) from None
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def check_file(path: Path, checksum: Checksum, expected: str) -> None:
    """Raise CheckpointError if a file is missing or its checksum differs."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    if checksum.of(path) != expected:
        raise CheckpointError(f"{path} is damaged: its checksum is not the one in {checksum.file}")
