"""Saver that tolerates failed saves, so that a temporarily full disk does not end a run."""

from dataclasses import dataclass

from megatron.ranks.rank_0 import print_rank_0

from .failures import SaveError
from .save import Saver
from .state import TrainState


@dataclass
class RetryingSaver:
    """A `Saver` that tolerates failed saves: training continues, and the next save tries again.

    Only errors of the disk are tolerated. Other failures are raised at once, such as weights that differ between
    replicas or are not finite. All ranks must make the same calls.
    limit: number of consecutive failures to tolerate; the next failure raises SaveError.
    """

    saver: Saver
    limit: int
    failures: int = 0  # consecutive failures

    @property
    def is_pending(self) -> bool:
        """True from the start of a background save until `finish` completes the save."""
        return self.saver.is_pending

    @property
    def is_writing(self) -> bool:
        """True while this rank still writes its share of a background save."""
        return self.saver.is_writing

    def save(self, state: TrainState, wait: bool = False, must_succeed: bool = False) -> None:
        """Save a checkpoint of `state`.

        wait: return only when the checkpoint is valid, even with background saves.
        must_succeed: wait, and raise SaveError if the save fails. For the last save of a run.
        """
        if self.is_pending:
            self.finish()
        try:
            self.saver.save(state, wait or must_succeed)
        except SaveError as error:
            self._tolerate_failure(error, must_succeed)
        else:
            if not self.is_pending:  # a background save may still fail in `finish`
                self.failures = 0

    def finish(self) -> None:
        """Wait for the background save and publish its checkpoint. All ranks must call this."""
        try:
            self.saver.finish()
        except SaveError as error:
            self._tolerate_failure(error, must_succeed=False)
        else:
            self.failures = 0

    def _tolerate_failure(self, error: SaveError, must_succeed: bool) -> None:
        """Count a failed save and print a note; raise its error if it must succeed or too many failed in a row."""
        self.failures += 1
        if must_succeed or self.failures > self.limit:
            raise error
        print_rank_0(
            f"note: {error}; training continues, and the next save tries again (failed saves in a row: "
            f"{self.failures}, tolerated: {self.limit})"
        )
