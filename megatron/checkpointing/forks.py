"""Checkpoints of other branches: those that a run abandoned when it resumed from an earlier checkpoint."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from .checksums import SHA256
from .files import CheckpointError, sums_file
from .reader import CheckpointReader
from .state import TrainState

Forks = Sequence[tuple[int, int]]  # see TrainState


def forks_of(path: Path) -> Forks | None:
    """Return the forks of the run that wrote the checkpoint `path`; None if it is damaged."""
    sums = sums_file(path)
    return _forks_of(path, SHA256.hash_file(sums)) if sums.is_file() else None


# Cached, as each save asks for all kept checkpoints. A checkpoint with the same checksums has the same content.
@cache
def _forks_of(path: Path, sums: str) -> Forks | None:
    try:
        return TrainState.from_dict(CheckpointReader(path).state).forks
    except CheckpointError:
        return None


def without_abandoned(paths: Iterable[Path], forks: Forks) -> Iterator[Path]:
    """Yield the checkpoints of `paths` that a run with these forks has not abandoned, and damaged ones."""
    if not forks:
        yield from paths
        return
    for path in paths:
        iteration = int(path.name[5:])  # the name is "iter_" and the iteration
        # A checkpoint has the forks of its run from earlier iterations; fork[0] is the iteration. After a fork at
        # iteration 100, a checkpoint of iteration 200 that has this fork belongs to the run. One without this fork was
        # saved before the fork, and is abandoned.
        expected_forks = tuple(fork for fork in forks if fork[0] < iteration)
        if forks_of(path) in (None, expected_forks):  # None: a damaged checkpoint
            yield path
