"""Seeds, and the global random generators of torch, NumPy and Python."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

CPU = torch.device("cpu")


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed derived from `parts`, the same on every machine and Python version."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_generators(seed: int, accelerators: bool = True) -> None:
    """Seed the generators of torch, NumPy and Python.

    accelerators: seed torch's generators of accelerators, too, not only that of the CPU.
    """
    if accelerators:
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
    np.random.seed(seed % (1 << 32))  # NumPy takes only 32 bits
    random.seed(seed)


@contextmanager
def keep_random_state(device: torch.device = CPU) -> Iterator[None]:
    """Restore the generators of torch (for the CPU and `device`), NumPy and Python at the end of the block."""
    devices = [] if device.type == "cpu" else [device]  # fork_rng() restores the CPU's generator in any case
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        with torch.random.fork_rng(devices, device_type=device.type):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
