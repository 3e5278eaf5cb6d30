"""The file with the checksums of a checkpoint's other files, such as BLAKE3SUMS: reading and checking."""

import re
from pathlib import Path

from ..atomic import why_missing
from .checksums import Checksum
from .files import INDEX, CheckpointError, sums_file
from .lookup import resume_advice

_SUMS_LINE = re.compile(r"([0-9a-f]{64})  ([^/]+)")


def read_sums(checkpoint: Path) -> dict[str, str]:
    """Read the checksum file and return the checksum of each file, by name. Raises CheckpointError."""
    path = sums_file(checkpoint)
    _require_file(path)
    lines = path.read_bytes().decode("utf-8", "replace").split("\n")[:-1]  # nothing follows the last newline
    sums = dict[str, str]()
    for number, line in enumerate(lines, 1):
        match = _SUMS_LINE.fullmatch(line)  # group 1 is the checksum, group 2 the file name
        if not match or match[2] in (".", "..") or match[2] in sums:
            raise unreadable_error(path, f"is damaged in line {number}")
        sums[match[2]] = match[1]
    if INDEX not in sums:
        raise unreadable_error(path, f"is damaged: it does not list {INDEX}")
    return sums


def check_file(path: Path, checksum: Checksum, expected: str) -> None:
    """Raise CheckpointError if a file is missing or its checksum differs."""
    _require_file(path)
    if checksum.hash_file(path) != expected:
        raise unreadable_error(path, f"is damaged: its checksum is not the one in {checksum.sums_name}")


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise unreadable_error(path, why_missing(path))


def unreadable_error(path: Path, problem: str) -> CheckpointError:
    """Return the error for a file of a checkpoint, with advice how to continue without this checkpoint."""
    return CheckpointError(f"{path} {problem}; {resume_advice(path.parent)}")
