"""The file with the checksums of a checkpoint's other files, such as BLAKE3SUMS: reading and checking."""

import re
from pathlib import Path

from ..atomic import absence
from .checksums import Checksum
from .files import INDEX, CheckpointError, sums_file, way_back

_LINE = re.compile(r"([0-9a-f]{64})  ([^/]+)")


def read_sums(checkpoint: Path) -> dict[str, str]:
    """Read the checksum file and return the checksum of each file, by name. Raises CheckpointError."""
    path = sums_file(checkpoint)
    if not path.is_file():
        raise unreadable(path, absence(path))
    lines = path.read_bytes().decode("utf-8", "replace").split("\n")[:-1]
    sums: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        found = _LINE.fullmatch(line)
        if not found or found[2] in (".", "..") or found[2] in sums:
            raise unreadable(path, f"is damaged in line {number}")
        sums[found[2]] = found[1]
    if INDEX not in sums:
        raise unreadable(path, f"is damaged: it does not list {INDEX}")
    return sums


def check_file(path: Path, checksum: Checksum, expected: str) -> None:
    """Raise CheckpointError if a file is missing or its checksum differs."""
    if not path.is_file():
        raise unreadable(path, absence(path))
    if checksum.of(path) != expected:
        raise unreadable(path, f"is damaged: its checksum is not the one in {checksum.file}")


def unreadable(path: Path, why: str) -> CheckpointError:
    """Return the error for a file of a checkpoint, with advice how to continue without this checkpoint."""
    return CheckpointError(f"{path} {why}; {way_back(path.parent)}")
