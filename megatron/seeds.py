"""Seeds, and the global random generators of torch, NumPy and Python."""

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed derived from `parts`, the same on every machine and Python version."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_generators(seed: int, accelerators: bool = True) -> None:
    """Seed the generators of torch, NumPy and Python. accelerators: seed those of accelerators, too."""
    if accelerators:
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
    np.random.seed(seed % (1 << 32))
    random.seed(seed)


@contextmanager
def keep_random_state(devices: Sequence[int] | None = None) -> Iterator[None]:
    """Restore the generators of torch, NumPy and Python at the end of the block.

    devices: numbers of the accelerators whose generators are restored, too; None for all.
    """
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
