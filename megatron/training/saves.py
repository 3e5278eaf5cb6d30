"""The part of a run that decides when a run saves a checkpoint and when the run stops."""

import torch.distributed as dist

from tds import trace

from ..engines.engine import StepResult
from ..locks.held_places import HeldPlaces
from ..ranks.errors import RunError
from ..ranks.rank_0 import print_rank_0
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
        # _saved: iteration of the newest saved state. _began: iteration in which its save began; after skipped steps,
        # it is later than _saved.
        self._saved = self._began = run.state.iteration

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Complete a background save if an error ends the run and all ranks have this error, since it is collective."""
        if not self._run.saver.pending:
            return
        is_alone = dist.get_world_size() == 1 and isinstance(error, Exception)
        is_everywhere = is_alone or isinstance(error, RunError)
        if not is_everywhere or self._places.find_lost():
            return
        try:
            self._run.saver.finish()
        except RunError as failure:
            print_rank_0(f"note: {failure}")

    def after_step(self, step: StepResult | None, samples: SampleRange) -> None:
        run = self._run
        settings = run.config.checkpoint
        asked, is_written = run.signals.agree(run.saver.pending and not run.saver.busy)
        if asked is StopSignal.SAVE_AND_STOP or due(samples.iteration, settings.exit_interval or 0):
            run.stop = True
        # `agree` returns what the ranks reported at its previous call. So in the iteration after a save began,
        # `is_written` is still a report from before this save.
        if run.saver.pending and is_written and samples.iteration > self._began + 1:
            self._finish()
        is_due = asked is StopSignal.SAVE or due(samples.iteration, settings.save_interval)
        if run.stop or is_due:
            self._began = samples.iteration
            self._save(must=run.stop)

    def complete(self) -> None:
        """Complete a background save, and repeat the last save if it failed.

        If all iterations are done, save the final state unless it is already saved.
        """
        run = self._run
        if run.saver.pending:
            self._finish()
        is_done = run.state.iteration >= run.config.train.train_iters
        is_unsaved = is_done and run.state.iteration != self._saved and run.config.checkpoint.save_at_end
        if run.saver.failures or is_unsaved:
            self._save(must=True)

    def _finish(self) -> None:
        lost = self._places.find_lost()
        if lost and not lost.free:
            raise RunError(lost.words)
        self._run.saver.finish()

    def _save(self, must: bool) -> None:
        """Save the state after the last step that was not skipped, unless this state is already saved.

        must: True for the last save of a run: log unreported iterations before the save, and raise if the save fails.
        """
        run = self._run
        log = run.log
        lost = self._places.find_lost()
        if lost and not lost.free:
            raise RunError(lost.words)
        must = must or lost is not None
        log.check()
        if must and log.has_unreported:
            log.report()
        good = log.health.state_to_save(run.state)
        if good.iteration == run.state.iteration:
            good.features = run.features.state()  # features that act after the log may have changed it
        else:
            print_rank_0(
                f"all steps since iteration {good.iteration} were skipped, so the checkpoint has the state of "
                f"iteration {good.iteration}"
            )
        if good.iteration != self._saved or run.saver.failures:
            run.features.before_save(good.iteration)
            with trace.span("checkpoint"):
                run.saver.save(good, must=must)
        if lost:
            raise RunError(lost.words)
        log.restart()
        self._saved = good.iteration
