"""Random numbers that select documents of a file; each depends only on seed, file number and byte offset."""

import hashlib


def uniform(seed: int, file: int, offset: int) -> float:
    """Return a number in [0, 1); the numbers of different seeds, files or offsets are independent."""
    key = f"{seed} {file} {offset}".encode()
    bits = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    return (bits >> 11) / 2**53  # the 53 bits that a float can hold exactly
