"""Seeded shuffle of more lines than fit into memory."""

import os
import random
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

PILES = 64  # number of temporary files (piles) of lines, of which only one is in memory at a time


def shuffled(lines: Iterable[bytes], seed: int, folder: str | None = None, piles: int = PILES) -> Iterator[bytes]:
    """Yield the lines, each of which ends with a newline, in a uniformly random order that `seed` determines.

    Each line is written to a random temporary file, a pile. Then the piles are shuffled in memory one after another.
    folder: folder for the piles, which need as much disk space as all lines; default: the system's temporary folder.
    """
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        paths = [Path(scratch) / f"pile{i}" for i in range(piles)]
        with ExitStack() as stack:
            files = [stack.enter_context(open(path, "wb")) for path in paths]
            for line in lines:
                file = files[rng.randrange(piles)]
                try:
                    file.write(line)
                except OSError as error:  # usually a full disk; name the folder in the error
                    error.filename = scratch
                    raise
        for path in paths:
            pile = path.read_bytes().splitlines(keepends=True)
            os.unlink(path)
            rng.shuffle(pile)
            yield from pile
