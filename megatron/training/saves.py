"""The hook that decides when a run saves and when it stops."""

from tds import trace

from ..ranks.rank_0 import print_rank_0
from ..ranks.signals import StopSignal, StopSignals
from .engine import Step
from .health import SampleRange
from .hooks import Hook, due
from .log import TrainingLog
from .run_state import Run


class Saves(Hook):
    """Hook that saves every --save-interval iterations and on signals.

    stop: whether a signal, --exit-interval or the time limit ends the run after this iteration.
    """

    def __init__(self, run: Run, log: TrainingLog, signals: StopSignals) -> None:
        self._run, self._log, self._signals = run, log, signals
        # Iteration of the newest saved state, and (after skipped steps, a later one) the iteration when its save began.
        self._saved = self._began = run.state.iteration
        self.stop = False

    def after_step(self, step: Step | None, samples: SampleRange) -> None:
        saver, c = self._run.saver, self._run.config.checkpoint
        asked, written = self._signals.agree(saver.pending and not saver.busy)
        self.stop = asked is StopSignal.SAVE_AND_STOP or due(samples.iteration, c.exit_interval or 0)
        # `agree` returns the reports of the previous call: right after a save has begun, `written` is about older ones.
        if saver.pending and written and samples.iteration > self._began + 1:
            saver.finish()
        if self.stop or asked is StopSignal.SAVE or due(samples.iteration, c.save_interval):
            self._began = samples.iteration
            self._save(must=self.stop)

    def end(self) -> None:
        """Complete a background save, and save the final state of a complete run if it is not saved yet."""
        run, c = self._run, self._run.config
        if run.saver.pending:
            run.saver.finish()
        unsaved = run.state.iteration != self._saved or run.saver.failures
        if run.state.iteration >= c.train.train_iters and unsaved and c.checkpoint.save_at_end:
            self._save(must=True)

    def _save(self, must: bool) -> None:
        """Save the state after the last applied step, unless only skipped steps followed the last save.

        must: raise if the save fails, and first log the iterations since the last log line. Set for the last save
        of a run.
        """
        run, log = self._run, self._log
        log.check()
        if must and log.has_unreported:
            log.report()
        good = log.health.state_to_save(run.state)
        if good.iteration != run.state.iteration:
            print_rank_0(
                f"no step was applied since iteration {good.iteration}, so the checkpoint is of that iteration"
            )
        if good.iteration != self._saved or run.saver.failures:
            with trace.span("checkpoint"):
                run.saver.save(good, must=must)
        log.restart()
        self._saved = good.iteration
