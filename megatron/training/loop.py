"""The training loop, which calls the parts of a run around each iteration, and the part that saves and stops."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from tqdm import tqdm

from tds import trace

from .. import mpu
from ..data.sample_hash import extend_hash
from ..data.skips import make_skip_check
from ..engines.engine import Batches, StepResult
from ..locks.held_places import HeldPlaces, LostPlace
from ..ranks.errors import RunError
from ..ranks.rank_0 import is_rank_0, print_rank_0
from ..ranks.signals import StopSignal
from .data_ranks import read_batches
from .evaluation import Evaluations, evaluate
from .feature import Feature, due
from .health import ReplicaChecks, SampleRange
from .log import TrainingLog
from .run_state import Run

__all__ = ["Run", "evaluate", "train"]
ALREADY_TRAINED = (
    "the run has already trained {} of --train-iters {} iterations; to train further, raise {} and pass "
    "--override-lr-schedule, or the learning rate stays at the end of its schedule"
)


def train(run: Run) -> None:
    """Train up to --train-iters, with evaluations and saves. Raises RunError if the run cannot continue.

    Each iteration calls `before_step` of all parts of the run, takes an optimizer step (unless a --skip-* flag skips
    the iteration), and calls `after_step` of all parts: the features, the log, evaluations and saves, in this order.
    The last part, `Saves`, decides whether the run stops early.
    """
    state = run.state
    last = run.config.train.train_iters
    if state.iteration >= last:
        length_flag = "--train-samples" if run.config.train.train_samples else "--train-iters"
        print_rank_0(ALREADY_TRAINED.format(state.iteration, last, length_flag))
    should_skip = make_skip_check(run.config.train, run.batches, state.iteration, state.consumed_samples)
    run.log = TrainingLog(run)
    parts, saves = _collect_parts(run)
    bar = _progress_bar(state.iteration, last)
    batches = _open_batches(run, should_skip) if state.iteration < last else None  # forks before signals change
    with bar, run.signals, run.features.running(run), saves:
        while state.iteration < last and not run.stop:
            for part in parts:
                part.before_step(state.iteration + 1)
            is_skipped = should_skip is not None and should_skip(state.consumed_samples)
            step = None if is_skipped else _train_step(run, batches)
            samples = _advance_state(run)
            bar.update()
            for part in parts:
                part.after_step(step, samples)
    saves.complete()
    if state.iteration < last:
        print_rank_0(f"stopped after iteration {state.iteration} as requested; run the same command to resume")
        return
    for part in parts:
        part.end()


def _train_step(run: Run, batches: Batches | None) -> StepResult:
    """Take an optimizer step on the next global batch."""
    state = run.state
    mpu.get_rng().begin(state.iteration)
    lr = run.lr(state.iteration, state.consumed_samples)
    return run.engine.train_batch(batches, lr, run.micro_batches(state.consumed_samples))


def _progress_bar(done: int, last: int) -> Any:
    """Return a progress bar on rank 0, if its output is a terminal."""
    disable = None if is_rank_0() else True  # None: disabled if the output is no terminal
    return tqdm(total=last, initial=min(done, last), disable=disable, unit="it", leave=False)


def _collect_parts(run: Run) -> tuple[list[Feature], "Saves"]:
    """Return all parts of a run, in the order in which an iteration calls them, and the last of them."""
    places = HeldPlaces(run)
    saves = Saves(run, places)
    before_log = [feature for feature in run.features if not feature.after_log]
    after_log = [feature for feature in run.features if feature.after_log]
    return [places, *before_log, ReplicaChecks(run), run.log, Evaluations(run), *after_log, saves], saves


def _open_batches(run: Run, should_skip: Callable[[int], bool] | None) -> Batches | None:
    """Return the iterator over the micro-batches of the remaining iterations; None on a rank that reads no data."""
    batches = read_batches(run.datasets[0], run.config, run.state.consumed_samples, should_skip, run.micro_batches)
    for feature in run.features:
        batches = feature.batches(batches)
    return batches


def _advance_state(run: Run) -> SampleRange:
    """Count the current iteration, even a skipped one, in the training state; return its number and samples."""
    state = run.state
    count = run.global_batch
    state.iteration += 1
    samples = SampleRange(state.iteration, state.consumed_samples, count)
    if is_rank_0():  # only rank 0 needs the hash: it writes the hash to the index of the checkpoint
        state.sample_hash = extend_hash(state.sample_hash, run.datasets[0], state.consumed_samples, count)
    state.consumed_samples += count
    state.consumed_tokens += count * sum(run.sample_shape)
    return samples


class Saves(Feature):
    """Part of a run that saves a checkpoint every --save-interval iterations and on signals.

    It sets `run.stop` if a signal, --exit-interval or --exit-duration-in-mins ends the run after this iteration; a
    feature may have set it before.
    """

    def __init__(self, run: Run, places: HeldPlaces) -> None:
        self._run = run
        self._places = places
        # _saved_iteration: of the newest saved state. _save_began: iteration in which its save began; after skipped
        # steps, it is later than _saved_iteration.
        self._saved_iteration = self._save_began = run.state.iteration

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, *_: object) -> None:
        """Complete a background save if an error ends the run and all ranks have this error, since it is collective."""
        if not self._run.saver.is_pending:
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
        signal, is_written = run.signals.agree(run.saver.is_pending and not run.saver.is_writing)
        if signal is StopSignal.SAVE_AND_STOP or due(samples.iteration, settings.exit_interval or 0):
            run.stop = True
        # `agree` returns what the ranks reported at its previous call. So in the iteration after a save began,
        # `is_written` is still a report from before this save.
        if run.saver.is_pending and is_written and samples.iteration > self._save_began + 1:
            self._finish_save()
        is_due = signal is StopSignal.SAVE or due(samples.iteration, settings.save_interval)
        if run.stop or is_due:
            self._save_began = samples.iteration
            self._save(is_last=run.stop)

    def complete(self) -> None:
        """Complete a background save, and repeat the last save if it failed.

        If all iterations are done, save the final state unless it is already saved.
        """
        run = self._run
        if run.saver.is_pending:
            self._finish_save()
        is_done = run.state.iteration >= run.config.train.train_iters
        is_unsaved = is_done and run.state.iteration != self._saved_iteration and run.config.checkpoint.save_at_end
        if run.saver.failures or is_unsaved:
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
        if state.iteration == run.state.iteration:
            state.features = run.features.state()  # features that act after the log may have changed it
        else:
            print_rank_0(
                f"all steps since iteration {state.iteration} were skipped, so the checkpoint has the state of "
                f"iteration {state.iteration}"
            )
        if state.iteration != self._saved_iteration or run.saver.failures:
            run.features.before_save(state.iteration)
            with trace.span("checkpoint"):
                run.saver.save(state, must_succeed=is_last)
        if lost:
            raise RunError(lost.message)
        log.restart_timer()
        self._saved_iteration = state.iteration
