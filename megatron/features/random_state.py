"""The global random generators, for features that must not change the random numbers of a run."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def keep_random_state() -> Iterator[None]:
    """Restore the generators of Python, NumPy and torch at the end of the `with` block."""
    python = random.getstate()
    numpy = np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
