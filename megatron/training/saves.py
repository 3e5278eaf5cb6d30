"""The part of a run that saves checkpoints, and that stops the run early."""

from tds import trace

from ..engines.engine import StepResult
from ..locks.held_places import HeldPlaces, LostPlace
from ..ranks.errors import RunError
from ..ranks.rank_0 import num_ranks, print_rank_0
from ..ranks.signals import StopSignal
from .feature import Feature, due
from .health import SampleRange
from .run_state import Run


class Saves(Feature):
    """Part of a run that saves a checkpoint every --save-interval iterations and on signals.

    It sets `run.stop` if a signal, --exit-interval or --exit-duration-in-mins ends the run after this iteration; a
    feature may have set it before.
    """

    def __init__(self, run: Run, places: HeldPlaces) -> None:
        self._run = run
        self._places = places
        self._first_iteration = run.state.iteration  # iteration of the state with which this start began
        self._saved_iteration = run.state.iteration  # iteration of the newest saved state
        self._save_began = run.state.iteration  # iteration in which its save began: a later one after skipped steps

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, *_: object) -> None:
        """Complete a background save if an error ends the run and all ranks have this error, since it is collective."""
        if not self._run.saver.is_pending:
            return
        # All ranks raise a RunError together. Without an error, nothing is done here, as `complete` follows.
        is_alone = num_ranks() == 1 and isinstance(error, Exception)
        is_everywhere = is_alone or isinstance(error, RunError)
        if not is_everywhere or self._places.find_lost():
            return
        try:
            self._run.saver.finish()
        except RunError as failure:
            print_rank_0(f"note: {failure}")

    def after_step(self, step: StepResult | None, samples: SampleRange) -> None:
        """Complete a background save that all ranks have written, and begin a save if one is due."""
        run = self._run
        run.state.features.update(run.features.state())  # also in the copies of `health`, which have the same dict
        iteration = samples.iteration
        settings = run.config.checkpoint
        has_written = run.saver.is_pending and not run.saver.is_writing  # this rank's part of a background save
        signal, all_have_written = run.signals.agree(has_written)
        if signal is StopSignal.SAVE_AND_STOP:
            run.stop = True
        if due(iteration, settings.exit_interval or 0):
            run.log.check()
            # If all steps were skipped, there is nothing to save, and the next start would come to the same stop.
            run.stop = run.stop or run.log.health.state_to_save(run.state).iteration > self._first_iteration
        # `agree` returns what the ranks reported at its previous call. If a save began at the end of iteration 10, the
        # call in iteration 11 returns reports of iteration 10, from before the save. The call in iteration 12 is the
        # first that returns reports about this save.
        if run.saver.is_pending and all_have_written and iteration > self._save_began + 1:
            self._finish_save()
        is_due = signal is StopSignal.SAVE or due(iteration, settings.save_interval)
        if run.stop or is_due:
            self._save_began = iteration
            self._save(is_last=run.stop)

    def complete(self) -> None:
        """Complete a background save, and repeat the last save if it failed.

        If all iterations are done, save the final state unless it is already saved.
        """
        run = self._run
        if run.saver.is_pending:
            self._finish_save()
        is_done = run.state.iteration >= run.config.train.train_iters
        # The final state is already saved if the last iteration was one of --save-interval.
        is_unsaved = run.state.iteration != self._saved_iteration
        needs_final_save = is_done and is_unsaved and run.config.checkpoint.save_at_end
        if run.saver.failures or needs_final_save:
            self._save(is_last=True)

    def _finish_save(self) -> None:
        self._check_places()
        self._run.saver.finish()

    def _check_places(self) -> LostPlace | None:
        """Return a folder that the run has lost and taken again. Raises RunError if it could not take it again."""
        lost = self._places.find_lost()
        if lost and not lost.is_retaken:
            raise RunError(lost.message)
        return lost

    def _save(self, is_last: bool) -> None:
        """Save the state after the last step that was not skipped, unless this state is already saved.

        is_last: the last save of a run logs unreported iterations before the save, and raises if the save fails.
        """
        run = self._run
        log = run.log
        lost = self._check_places()
        is_last = is_last or lost is not None  # the run ends below if it has lost a folder
        log.check()
        if is_last and log.has_unreported:
            log.report()
        state = log.health.state_to_save(run.state)
        iteration = state.iteration
        if iteration == run.state.iteration:
            state.features = run.features.state()  # features that act after the log may have changed it
        else:
            print_rank_0(
                f"all steps since iteration {iteration} were skipped, so the checkpoint has the state of "
                f"iteration {iteration}"
            )
        # After a failed save or the loss of a folder, this state may be missing on the disk.
        if iteration != self._saved_iteration or run.saver.failures or lost:
            for feature in run.features:
                feature.before_save(iteration)  # it may raise to prevent the save
            with trace.span("checkpoint"):
                run.saver.save(state, must_succeed=is_last)
        if lost:
            raise RunError(lost.message)
        log.restart_timer()
        self._saved_iteration = iteration  # even if the save has failed: then `failures` causes another one
