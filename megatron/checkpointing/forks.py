"""Checkpoints of other branches: those that a run abandoned when it resumed from an earlier checkpoint."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from .files import CheckpointError
from .reader import CheckpointReader
from .state import TrainState

Forks = Sequence[tuple[int, int]]  # see TrainState


def forks_of(path: Path) -> Forks | None:
    """Return the forks of the run that wrote the checkpoint `path`; None if it is damaged."""
    try:
        return TrainState.from_dict(CheckpointReader(path).state).forks
    except CheckpointError:
        return None


def without_abandoned(paths: Iterable[Path], forks: Forks) -> list[Path]:
    """Return the checkpoints of `paths` that a run with these forks has not abandoned, and damaged ones."""
    if not forks:
        return list(paths)
    remaining = []
    for path in paths:
        iteration = int(path.name[5:])  # the name is "iter_" and the iteration
        # A checkpoint has the earlier forks of its run. After a fork at iteration 100, a checkpoint of iteration 200
        # that has this fork belongs to the run. One without this fork was saved before the fork, and is abandoned.
        expected_forks = tuple(fork for fork in forks if fork[0] < iteration)
        if forks_of(path) in (None, expected_forks):  # None: a damaged checkpoint
            remaining.append(path)
    return remaining
