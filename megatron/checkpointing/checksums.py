"""Checksums of a checkpoint's files: BLAKE3, which several threads compute as fast as memory is read, or SHA-256.

New checkpoints have BLAKE3SUMS, or SHA256SUMS if the package blake3 is not installed. Both kinds can be loaded.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK = 1 << 24  # bytes that are read at once


@dataclass(frozen=True)
class Checksum:
    """A hash algorithm.

    file: name of the file that lists the checksums.
    new: function that returns a hash object; its argument says whether the object may use several threads.
    """

    name: str
    file: str
    new: Callable[[bool], Any]

    def of(self, path: Path) -> str:
        """Return the checksum of a file in hexadecimal."""
        digest = self.new(True)
        with path.open("rb", buffering=0) as file:
            block = memoryview(bytearray(min(BLOCK, max(path.stat().st_size, 1))))
            while count := file.readinto(block):
                digest.update(block[:count])
        return str(digest.hexdigest())


def _new_blake3(several_threads: bool) -> Any:
    import blake3

    return blake3.blake3(max_threads=blake3.blake3.AUTO if several_threads else 1)


SHA256 = Checksum("SHA-256", "SHA256SUMS", lambda several_threads: hashlib.sha256())
BLAKE3 = Checksum("BLAKE3", "BLAKE3SUMS", _new_blake3)
EVERY = BLAKE3, SHA256


def preferred() -> Checksum:
    """Return the algorithm for new checkpoints."""
    try:
        import blake3  # noqa: F401
    except ImportError:
        return SHA256
    return BLAKE3


def checksum_of(checkpoint: Path) -> Checksum:
    """Return the algorithm of a checkpoint, by the name of its checksum file; `preferred()` if it has none."""
    return next((each for each in EVERY if (checkpoint / each.file).is_file()), preferred())
