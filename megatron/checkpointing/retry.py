"""Saver that tolerates failed saves, so that a temporarily full disk does not end a run."""

from megatron.ranks.rank_0 import print_rank_0

from .failures import SaveError
from .save import Saver
from .state import TrainState


class RetryingSaver:
    """A `Saver` that tolerates failed saves: training continues, and the next save tries again.

    Only errors of the disk are tolerated. Other failures are raised at once, such as weights that differ between
    replicas or are not finite. All ranks must make the same calls.
    limit: number of consecutive failures to tolerate; the next failure raises SaveError.
    """

    def __init__(self, saver: Saver, limit: int) -> None:
        self.saver = saver
        self.limit = limit
        self.failures = 0  # consecutive failures

    @property
    def pending(self) -> bool:
        """True from the start of a background save until `finish` completes the save."""
        return self.saver.pending

    @property
    def busy(self) -> bool:
        """True while this rank still writes its share of a background save."""
        return self.saver.busy

    def save(self, state: TrainState, wait: bool = False, must: bool = False) -> None:
        """Save a checkpoint of `state`.

        wait: return only when the checkpoint is valid, even with background saves.
        must: wait, and raise SaveError if the save fails. For the last save of a run.
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
        """Wait for the background save and publish its checkpoint. All ranks must call this."""
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
            f"note: {error}; training continues, and the next save tries again (failed saves in a row: "
            f"{self.failures}, tolerated: {self.limit})"
        )
