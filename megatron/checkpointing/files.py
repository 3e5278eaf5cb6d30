"""The files of a checkpoint: atomic publication, and lookup of the newest checkpoint."""

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..atomic import why_missing, write_text
from ..json_text import read_json
from ..storage import RemotePath, to_path
from .checksums import BLAKE3, SHA256, Checksum, checksum_algorithm

INDEX = "checkpoint.json"
TENSORS = ".safetensors"
FORMAT = 3
WEIGHT = "weight"  # a weight has the key `weight.<parameter>`, an optimizer moment the key `<moment>.<parameter>`
BUFFER = "buffer"  # a persistent buffer has the key `buffer.<name>`
_LATEST = re.compile(r"(?P<name>[^\n/]+)(\n(?P<sums>[0-9a-f]{64})?\n?)?")


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or belongs to another model; the message names its path."""


def fsync_path(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def temporary_folder(final: Path) -> Path:
    """Return the folder to write a checkpoint to; in object storage, where nothing can be renamed, its final one."""
    return final if isinstance(final, RemotePath) else final.with_name(final.name + ".tmp")


def publish(final: Path, temporary: Path, index: str, checksum: Checksum, sums: Mapping[str, str]) -> None:
    """Turn the folder `temporary` of written tensors into the checkpoint `final`, and make `latest` name `final`.

    If an earlier checkpoint exists, a crash at any moment leaves at least one complete checkpoint, and `latest` names
    it. There is one exception: if this iteration had been saved before, a crash between the two renames leaves that
    checkpoint under a temporary name, and a crash after them leaves `latest` with its checksum; `restore_replaced`
    repairs both. index: text of checkpoint.json.
    sums: the checksum of each tensor file in `temporary`, by name.
    """
    write_text(temporary / INDEX, index, synced=True)
    all_sums = {INDEX: checksum.hash_file(temporary / INDEX), **sums}
    write_text(temporary / checksum.sums_name, format_sums(all_sums), synced=True)
    fsync_path(temporary)
    old_save = old_save_path(final)
    from .foreign import keep_foreign

    keep_foreign(final)
    if final.exists():  # there is an earlier save of this iteration
        shutil.rmtree(old_save, ignore_errors=True)
        final.rename(old_save)
    temporary.rename(final)
    fsync_path(final.parent)
    point_latest_to(final)
    shutil.rmtree(old_save, ignore_errors=True)


def format_sums(sums: Mapping[str, str]) -> str:
    """Return the text of the checksum file. sums: checksum of each file, by name."""
    return "".join(f"{sums[name]}  {name}\n" for name in sorted(sums))


def point_latest_to(checkpoint: Path) -> None:
    """Write the name of a complete checkpoint into the file `latest` next to it."""
    folder = checkpoint.parent
    content = f"{checkpoint.name}\n{SHA256.hash_file(sums_file(checkpoint))}\n"
    if isinstance(folder, RemotePath):
        (folder / "latest").write_bytes(content.encode())
        return
    write_text(folder / "latest", content, synced=True, temporary=folder / "latest.tmp")
    fsync_path(folder)


def sums_file(checkpoint: Path) -> Path:
    """Return the path of the file with the checksums of a checkpoint's other files."""
    return checkpoint / checksum_algorithm(checkpoint).sums_name


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is a checkpoint; in object storage, the index shows that the upload has finished."""
    return path.name[5:].isdigit() and sums_file(path).is_file() and (path / INDEX).is_file()  # [5:]: without "iter_"


def old_save_path(checkpoint: Path) -> Path:
    """Return the name under which an earlier save of the same iteration waits until the new one is published."""
    return checkpoint.with_name(checkpoint.name + ".old.tmp")


def latest_name(folder: Path) -> str | None:
    """Return the first line of the file `latest`, the name of a checkpoint; None if there is no such file."""
    pointer = folder / "latest"
    return pointer.read_bytes().decode("utf-8", "replace").split("\n")[0] if pointer.is_file() else None


def numbered_checkpoints(folder: Path) -> dict[int, Path]:
    """Return iteration -> checkpoint in `folder`, damaged or not, in ascending order."""
    checkpoints = {int(path.name[5:]): path for path in folder.glob("iter_*") if path.name[5:].isdigit()}
    return dict(sorted(checkpoints.items()))


def resume_advice(checkpoint: Path) -> str:
    """Return how to resume without an unreadable checkpoint: from the newest before it, else from the newest other."""
    folder = checkpoint.parent
    complete = [path.name for path in numbered_checkpoints(folder).values() if is_checkpoint(path)]
    if checkpoint.name in complete:
        complete.remove(checkpoint.name)
    candidates = [name for name in complete if name < checkpoint.name] or complete
    if not candidates:
        return f"{folder} has no other checkpoint; restore it from a copy"
    return f"to resume from {candidates[-1]}, write its name into {folder / 'latest'}"


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
    match = _LATEST.fullmatch(content.decode("utf-8", "replace"))
    if not match or match["name"] in (".", "..") or not match["name"].isprintable():
        raise CheckpointError(f"{pointer} is damaged; {resume_advice(pointer)}")
    path = folder / match["name"]
    if not path.is_dir():
        if pointer.read_bytes() != content:  # a run has saved and deleted meanwhile
            return latest_checkpoint(folder)
        problem = "is a file" if path.is_file() else why_missing(path)
        raise CheckpointError(f"{pointer} names {path.name}, but {path} {problem}; {resume_advice(path)}")
    sums = sums_file(path)
    if match["sums"] and sums.is_file() and SHA256.hash_file(sums) != match["sums"]:
        check = {BLAKE3.sums_name: "b3sum -c", SHA256.sums_name: "sha256sum -c"}[sums.name]
        raise CheckpointError(
            f"the checksum in {pointer} is not that of {sums}: one of the two files is damaged; "
            f"if `{check} {sums.name}` finds no error in {path.name}, "
            f"write only the name {path.name} into latest; otherwise, {resume_advice(path)}"
        )
    return path


def _refuse_missing_pointer(pointer: Path) -> None:
    """Raise CheckpointError if there are checkpoints beside the missing file `latest`, or if it is a folder."""
    if pointer.is_dir():
        raise CheckpointError(f"{pointer} is a folder, but must be a file: remove it; {resume_advice(pointer)}")
    names = sorted(path.name for path in pointer.parent.glob("iter_*") if is_checkpoint(path))
    if names:
        raise CheckpointError(
            f"the file {pointer} is missing; to resume from {names[-1]}, create {pointer} with the text {names[-1]}"
        )


def save_folder_of(run_dir: Path) -> Path | None:
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
    base = to_path(load)
    folders = [base / "checkpoints", base]
    save_folder = save_folder_of(base)
    if save_folder:
        folders.append(save_folder)
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
