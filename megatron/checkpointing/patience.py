"""Saves that may fail: a disk that is full for an hour does not end a run of weeks."""

from megatron.ranks.rank_0 import print_rank_0

from .save import SaveError, Saver
from .state import TrainState


class PatientSaver:
    """A `Saver` of which some saves in a row may fail; training goes on, and the next one is a new chance.

    limit: how many in a row; one more raises the SaveError that says why. What is not the disk's fault, as weights that
    differ or are not finite, is raised at once. All ranks must make the same calls.
    """

    def __init__(self, saver: Saver, limit: int) -> None:
        self.saver, self.limit = saver, limit
        self.failures = 0  # in a row

    @property
    def pending(self) -> bool:
        """Whether a save goes on in the background."""
        return self.saver.pending

    @property
    def busy(self) -> bool:
        """Whether this rank still writes."""
        return self.saver.busy

    def save(self, state: TrainState, wait: bool = False, must: bool = False) -> None:
        """A checkpoint of now; see `Saver.save`. must: there is no other chance after this one, so that failing raises."""
        if self.pending:
            self.finish()
        try:
            self.saver.save(state, wait or must)
        except SaveError as error:
            self._failed(error, must)
        else:
            self.failures = 0 if not self.pending else self.failures

    def finish(self) -> None:
        """Wait for the save in the background and publish it; collective."""
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
        print_rank_0(f"note: {error}; training goes on, the next save tries again ({self.failures} of {self.limit})")
