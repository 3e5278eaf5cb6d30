"""Saves that may fail: a disk that is full for an hour does not end a run of weeks."""

from megatron.ranks.rank_0 import print_rank_0

from .save import SaveError, Saver
from .state import TrainState


class RetryingSaver:
    """A `Saver` that tolerates failed saves: training continues, and the next save tries again.

    Failures that are not the disk's fault, such as weights that differ between replicas or are not finite, are
    raised at once. All ranks must make the same calls.
    limit: number of failures in a row that are tolerated; one more failure raises SaveError.
    """

    def __init__(self, saver: Saver, limit: int) -> None:
        self.saver, self.limit = saver, limit
        self.failures = 0  # failures in a row

    @property
    def pending(self) -> bool:
        """True from the beginning of a background save until `finish` completes it."""
        return self.saver.pending

    @property
    def busy(self) -> bool:
        """True while this rank still writes its share of a background save."""
        return self.saver.busy

    def save(self, state: TrainState, wait: bool = False, must: bool = False) -> None:
        """Save a checkpoint of `state`.

        wait: return only when the checkpoint is valid, even with background saves.
        must: wait, and raise if the save fails, as no later save follows.
        """
        if self.pending:
            self.finish()
        try:
            self.saver.save(state, wait or must)
        except SaveError as error:
            self._failed(error, must)
        else:
            self.failures = 0 if not self.pending else self.failures

    def finish(self) -> None:
        """Wait for the background save and publish it. A collective."""
        try:
            self.saver.finish()
        except SaveError as error:
            self._failed(error, must=False)
        else:
            self.failures = 0

    def _failed(self, error: SaveError, must: bool) -> None:
        self.failures += 1
        if must or self.failures > self.limit:
            raise error
        print_rank_0(
            f"note: {error}; training continues, and the next save tries again ({self.failures} of {self.limit})"
        )
