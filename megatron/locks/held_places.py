"""The part of a run that notices that the run directory or the checkpoint folder was removed, renamed or replaced."""

from typing import NamedTuple

from ..engines.engine import StepResult
from ..ranks.objects import broadcast_from_rank_0
from ..ranks.rank_0 import is_rank_0
from ..ranks.signals import StopSignal
from ..training.feature import Feature
from ..training.health import SampleRange
from ..training.run_state import Run


class LostPlace(NamedTuple):
    """A folder whose lock this run has lost. is_retaken: whether the run took it again, so that it may save there."""

    message: str
    is_retaken: bool


class HeldPlaces(Feature):
    """Part of a run that asks the run to stop as soon as it has lost a lock. Only rank 0 holds locks."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._lost: LostPlace | None = None

    def after_step(self, step: StepResult | None, samples: SampleRange) -> None:
        """Ask for a save and the end of the run if a folder is lost."""
        if any(lock.is_lost() for lock in self._run.locks):
            self._run.metrics.is_paused = True
            self._run.signals.ask(StopSignal.SAVE_AND_STOP)

    def find_lost(self) -> LostPlace | None:
        """Return the folder of the newest loss, None if this run never lost one. All ranks must call this.

        If the folders are gone or empty, this run takes their locks again, in new folders.
        """
        lost = self._lost
        if is_rank_0():
            lost = self._take_back() or lost  # without a new loss, an earlier one still counts
        self._lost = broadcast_from_rank_0(lost)
        return self._lost

    def _take_back(self) -> LostPlace | None:
        """Take all lost locks again, or none of them; return the first lost folder, None if there is none."""
        lost = [lock for lock in self._run.locks if lock.is_lost()]
        if not lost:
            return None
        what_happened = f"{lost[0].path.parent} was removed, renamed or replaced while this run used it"
        for lock in lost:
            reason = lock.take_back()
            if reason:  # this run cannot save, so it also gives up the locks that it has taken again
                for lost_lock in lost:
                    lost_lock.release()
                message = f"{what_happened}, and {lock.path.parent} {reason}: this run ends unsaved"
                return LostPlace(message, is_retaken=False)
        self._run.metrics.is_paused = False
        # The message is shown after the save, which is still to come.
        message = f"{what_happened}; this run has saved into a folder of this name, and ends"
        return LostPlace(message, is_retaken=True)
