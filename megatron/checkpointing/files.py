"""The files of a checkpoint, and their atomic publication."""

import contextlib
from collections.abc import Mapping
from pathlib import Path

from ..atomic import fsync_path, write_text
from ..storage import RemotePath
from .checksums import SHA256, Checksum, checksum_algorithm

INDEX = "checkpoint.json"
TENSORS = ".safetensors"
FORMAT = 3
WEIGHT = "weight"  # a weight has the key `weight.<parameter>`, an optimizer moment the key `<moment>.<parameter>`
BUFFER = "buffer"  # a persistent buffer has the key `buffer.<name>`


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or belongs to another model; the message names its path."""


def temporary_folder(final: Path) -> Path:
    """Return the folder to write a checkpoint to; in object storage, where nothing can be renamed, its final one."""
    return final if isinstance(final, RemotePath) else final.with_name(final.name + ".tmp")


def publish(final: Path, temporary: Path, index: str, checksum: Checksum, sums: Mapping[str, str]) -> None:
    """Turn the folder `temporary` of written tensors into the checkpoint `final`, and make `latest` name `final`.

    If an earlier checkpoint exists, a crash at any moment leaves at least one complete checkpoint, and `latest` names
    it. Only if this iteration had been saved before, a crash may leave that checkpoint under a temporary name, or
    `latest` with its checksum; `restore_replaced` repairs both.
    index: text of checkpoint.json. sums: the checksum of each tensor file in `temporary`, by name.
    """
    write_text(temporary / INDEX, index, synced=True)
    all_sums = {INDEX: checksum.hash_file(temporary / INDEX), **sums}
    write_text(temporary / checksum.sums_name, format_sums(all_sums), synced=True)
    fsync_path(temporary)
    old_save = old_save_path(final)
    from .foreign import delete_own_files, keep_foreign

    keep_foreign(final)  # renames what is there if no save has written it, such as a user's folder
    if final.exists():  # there is an earlier save of this iteration
        delete_own_files(old_save)
        final.rename(old_save)
    temporary.rename(final)
    fsync_path(final.parent)
    point_latest_to(final)
    with contextlib.suppress(OSError):  # the checkpoint is complete; the next start tries again
        delete_own_files(old_save)


def format_sums(sums: Mapping[str, str]) -> str:
    """Return the text of the checksum file. sums: checksum of each file, by name."""
    return "".join(f"{sums[name]}  {name}\n" for name in sorted(sums))


def point_latest_to(checkpoint: Path) -> None:
    """Write the name of a complete checkpoint into the file `latest` next to it."""
    folder = checkpoint.parent
    content = f"{checkpoint.name}\n{SHA256.hash_file(sums_file(checkpoint))}\n"  # name, checksum of its checksum file
    if isinstance(folder, RemotePath):
        (folder / "latest").write_bytes(content.encode())  # appears as a whole
        return
    write_text(folder / "latest", content, synced=True, temporary=folder / "latest.tmp")
    fsync_path(folder)


def sums_file(checkpoint: Path) -> Path:
    """Return the path of the file with the checksums of a checkpoint's other files."""
    return checkpoint / checksum_algorithm(checkpoint).sums_name


def old_save_path(checkpoint: Path) -> Path:
    """Return the name under which an earlier save of the same iteration waits until the new one is published."""
    return checkpoint.with_name(checkpoint.name + ".old.tmp")
