"""Lookup of the newest checkpoint in a folder or a run directory."""

import re
from pathlib import Path

from ..atomic import why_missing
from ..config import Config
from ..config.places import relocated
from ..json_text import read_json
from ..storage import RemotePath, to_path
from .checksums import BLAKE3, SHA256
from .files import INDEX, CheckpointError, sums_file

_LATEST = re.compile(r"(?P<name>[^\n/]+)(\n(?P<sums>[0-9a-f]{64})?\n?)?")


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is a checkpoint; in object storage, the index shows that the upload has finished."""
    number = path.name[5:]  # without "iter_"
    return number.isdigit() and sums_file(path).is_file() and (path / INDEX).is_file()


def latest_name(folder: Path) -> str | None:
    """Return the first line of the file `latest`, the name of a checkpoint; None if there is no such file."""
    pointer = folder / "latest"
    return pointer.read_bytes().decode("utf-8", "replace").split("\n")[0] if pointer.is_file() else None


def numbered_checkpoints(folder: Path) -> dict[int, Path]:
    """Return iteration -> checkpoint in `folder`, damaged or not, in ascending order."""
    # The names are "iter_" and the iteration.
    checkpoints = {int(path.name[5:]): path for path in folder.glob("iter_*") if path.name[5:].isdigit()}
    return dict(sorted(checkpoints.items()))


def complete_beside(path: Path) -> list[str]:
    """Return the names of the complete checkpoints beside `path`, in ascending order, without that of `path` itself."""
    checkpoints = numbered_checkpoints(path.parent).values()
    return [each.name for each in checkpoints if each.name != path.name and is_checkpoint(each)]


def resume_advice(checkpoint: Path) -> str:
    """Return how to resume without an unreadable checkpoint: from the newest before it, else from the newest other."""
    folder = checkpoint.parent
    complete = complete_beside(checkpoint)
    # Iterations have 7 digits with leading zeros. Those from 10,000,000 on have longer names, so lengths come first.
    limit = (len(checkpoint.name), checkpoint.name)
    earlier = [name for name in complete if (len(name), name) < limit]
    candidates = earlier or complete
    if not candidates:
        return f"{folder} has no other checkpoint; restore it from a copy"
    # `latest` does not matter if --load names a checkpoint, and belongs to the other run if --load names a run.
    newest = candidates[-1]
    return (
        f"to resume from {newest}, write its name into {folder / 'latest'}, or pass --load {folder / newest} if the "
        "checkpoint comes from the --load of another run or of a tool"
    )


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
    # "." and ".." would name this folder and its parent, so they are damage, too.
    if not match or match["name"] in (".", "..") or not match["name"].isprintable():
        raise CheckpointError(f"{pointer} is damaged; {resume_advice(pointer)}")
    path = folder / match["name"]
    if not path.is_dir():
        # If `latest` has changed meanwhile, a run has saved a checkpoint and deleted the one that it named before.
        if pointer.read_bytes() != content:
            return latest_checkpoint(folder)
        problem = "is a file" if path.is_file() else why_missing(path)
        raise CheckpointError(f"{pointer} names {path.name}, but {path} {problem}; {resume_advice(path)}")
    sums = sums_file(path)
    # The pointer has the SHA-256 of the checksum file, unless a user has omitted it.
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
    names = complete_beside(pointer)
    if names:
        raise CheckpointError(
            f"the file {pointer} is missing; to resume from {names[-1]}, create {pointer} with the text {names[-1]}"
        )


def save_folder_of(run_dir: Path) -> Path | None:
    """Return the place of --save that the settings in a run directory name; None without --save or settings.

    If it was inside a run directory that has moved, it has moved, too.
    """
    if isinstance(run_dir, RemotePath):
        return None
    try:
        settings = read_json(run_dir / "config.json", dict)
        saved = settings["checkpoint"]["save"]
        if not saved:
            return None
        old_run_dir = settings.get("log", {}).get("run_dir")
        if old_run_dir:
            # `relocated` takes settings by name, and changes paths that point into the old run directory.
            saved = relocated({"save": saved}, old_run_dir, str(run_dir))["save"]
        return to_path(saved)
    except (OSError, ValueError, KeyError, TypeError):  # there are no settings, or other ones than a run writes
        return None


def is_own_folder(load: str, config: Config, save_dir: str | Path | None) -> bool:
    """Return whether --load names the run directory or the checkpoint folder of this run itself."""
    own_folders = {to_path(each).resolve() for each in (save_dir, config.log.run_dir) if each}
    return to_path(load).resolve() in own_folders


def find_checkpoint(load: str) -> Path:
    """Return the checkpoint at `load`, or the newest checkpoint if `load` is a run directory or a checkpoint folder.

    The checkpoints of a run directory may lie elsewhere, where the run's --save put them. Older ones that an earlier
    start without --save has left in the run directory then do not count.
    """
    base = to_path(load)
    if sums_file(base).is_file() or (base / INDEX).is_file():  # --load names the checkpoint itself
        return base
    # `base` is a run directory with or without --save, or a folder of checkpoints. The first place with one counts.
    for folder in (save_folder_of(base), base / "checkpoints", base):
        path = latest_checkpoint(folder) if folder else None
        if path:
            return path
    advice = ""
    if (base / "model.safetensors").is_file() or (base / "model.safetensors.index.json").is_file():
        advice = ", but a Hugging Face model: import it with tools/convert_checkpoint.py --from-hf"
    raise CheckpointError(f"--load {load} holds no checkpoint{advice}")
