"""The file with the checksums of a checkpoint's other files, such as BLAKE3SUMS: reading and checking."""

import re
from pathlib import Path

from .checksums import Checksum
from .files import INDEX, CheckpointError, sums_file

_LINE = re.compile(r"([0-9a-f]{64})  ([^/]+)")


def read_sums(checkpoint: Path) -> dict[str, str]:
    """Read the checksum file and return the checksum of each file, by name. Raises CheckpointError."""
    path = sums_file(checkpoint)
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    lines = path.read_bytes().decode("utf-8", "replace").split("\n")[:-1]
    sums: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        found = _LINE.fullmatch(line)
        if not found or found[2] in (".", "..") or found[2] in sums:
            raise CheckpointError(f"{path}, line {number} is damaged")
        sums[found[2]] = found[1]
    if INDEX not in sums:
        raise CheckpointError(f"{path} does not list {INDEX}: it is damaged")
    return sums


def check_file(path: Path, checksum: Checksum, expected: str) -> None:
    """Raise CheckpointError if a file is missing or its checksum differs."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    if checksum.of(path) != expected:
        raise CheckpointError(f"{path} is damaged: its checksum is not the one in {checksum.file}")
