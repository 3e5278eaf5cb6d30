"""Random numbers that select documents of a file; each depends only on seed, file number and byte offset."""

import hashlib
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any

Draw = Callable[[int, int, int], float]  # (seed, number of the file, offset in bytes) -> number in [0, 1)


def uniform(seed: int, file: int, offset: int) -> float:
    """Return a number in [0, 1); the numbers of different seeds, files or offsets are independent."""
    key = f"{seed} {file} {offset}".encode()
    (bits,) = struct.unpack("<Q", hashlib.blake2b(key, digest_size=8).digest())
    return float(bits >> 11) / 2**53  # the 53 bits that a float can hold exactly


def crc32(seed: int, file: int, offset: int) -> float:
    """Return the number in [0, 1) that earlier versions drew; used only to finish jobs that those versions started.

    CRC-32 is linear: a change of the seed flips the same bits of every number. So the numbers of different seeds are
    not independent.
    """
    return zlib.crc32(f"{seed}/{file}/{offset}".encode()) / 2**32


DRAWS: dict[str, Draw] = {"blake2b": uniform, "crc32": crc32}


def draw_of(journal: Mapping[str, Any] | None) -> str:
    """Return the name in DRAWS of the random function of a preprocessing job.

    journal: the journal of the job to resume, which records the name; None for a new job, which gets the default.
    """
    return "blake2b" if journal is None else str(journal.get("draw", "crc32"))
