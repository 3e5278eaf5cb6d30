"""Checksums of a checkpoint's files: BLAKE3, which several threads compute as fast as memory is read, or SHA-256.

New checkpoints have BLAKE3SUMS, or SHA256SUMS if the package blake3 is not installed. Both kinds can be loaded.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.storage import RemotePath


@dataclass(frozen=True)
class Checksum:
    """A hash algorithm.

    sums_name: name of the file that lists the checksums.
    new_hash: function that returns a hash object, which uses one thread.
    """

    name: str
    sums_name: str
    new_hash: Callable[[], Any]

    def hash_file(self, path: Path) -> str:
        """Return the checksum of a file in hexadecimal; BLAKE3 of a local file is computed with several threads."""
        if self is BLAKE3 and not isinstance(path, RemotePath):
            blake3 = _import_blake3()
            try:
                return str(blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest())
            except OSError as error:  # the message of this error does not name the file
                raise OSError(f"{path} cannot be read: {error}") from None
        with path.open("rb", buffering=0) as file:
            return hashlib.file_digest(file, self.new_hash).hexdigest()


def _import_blake3() -> Any:
    try:
        from blake3 import blake3
    except ImportError:
        raise ValueError("checking BLAKE3SUMS needs the package blake3; install it") from None
    return blake3


SHA256 = Checksum("SHA-256", "SHA256SUMS", hashlib.sha256)
BLAKE3 = Checksum("BLAKE3", "BLAKE3SUMS", lambda: _import_blake3()())
ALGORITHMS = BLAKE3, SHA256


def preferred_checksum() -> Checksum:
    """Return the algorithm for new checkpoints."""
    try:
        import blake3  # noqa: F401
    except ImportError:
        return SHA256
    return BLAKE3


def checksum_algorithm(checkpoint: Path) -> Checksum:
    """Return the algorithm of a checkpoint, by the name of its checksum file; `preferred_checksum()` if it has none."""
    return next((each for each in ALGORITHMS if (checkpoint / each.sums_name).is_file()), preferred_checksum())
