"""The training loop. It runs the remaining iterations, and calls the features of the run around each of them."""

from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from .. import mpu
from ..data.sample_hash import extend
from ..data.skips import Skips, parse_ranges
from ..engines.engine import Batches, StepResult
from ..locks.held_places import HeldPlaces
from ..ranks.rank_0 import is_rank_0, print_rank_0
from ..ranks.replicas import check_replicas
from .data_ranks import read
from .evaluation import Evaluations, evaluate
from .feature import Feature, due
from .health import SampleRange
from .log import TrainingLog
from .run_state import Run
from .saves import Saves

__all__ = ["Run", "evaluate", "train"]
DONE = (
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
        raised = "--train-samples" if run.config.train.train_samples else "--train-iters"
        print_rank_0(DONE.format(state.iteration, last, raised))
    skips = _skips(run)
    run.log = TrainingLog(run)
    parts, saves = _parts(run)
    bar = _progress_bar(state.iteration, last)
    batches = _batches(run, skips) if state.iteration < last else None  # forks data workers before signals change
    with bar, run.signals, run.features.running(run), saves:
        while state.iteration < last and not run.stop:
            for part in parts:
                part.before_step(state.iteration + 1)
            is_skipped = skips is not None and skips(state.consumed_samples)
            step = None if is_skipped else _step(run, batches)
            samples = _advance(run)
            bar.update()
            for part in parts:
                part.after_step(step, samples)
    saves.complete()
    if state.iteration < last:
        print_rank_0(f"stopped after iteration {state.iteration} as requested; run the same command to resume")
        return
    for part in parts:
        part.end()


def _step(run: Run, batches: Batches | None) -> StepResult:
    """Take an optimizer step on the next global batch."""
    state = run.state
    mpu.get_rng().begin(state.iteration)
    lr = run.lr(state.iteration, state.consumed_samples)
    return run.engine.train_batch(batches, lr, run.micro_batches(state.consumed_samples))


def _progress_bar(done: int, last: int) -> Any:
    """Return a progress bar on rank 0, if its output is a terminal."""
    disable = None if is_rank_0() else True  # None: only if the output is no terminal
    return tqdm(total=last, initial=min(done, last), disable=disable, unit="it", leave=False)


def _parts(run: Run) -> tuple[list[Feature], Saves]:
    """Return all parts of a run, in the order in which an iteration calls them, and the last of them."""
    places = HeldPlaces(run)
    saves = Saves(run, places)
    before = [each for each in run.features if not each.after_log]
    after = [each for each in run.features if each.after_log]
    return [places, *before, ReplicaChecks(run), run.log, Evaluations(run), *after, saves], saves


def _batches(run: Run, skips: Callable[[int], bool] | None) -> Batches | None:
    """Return the iterator over the micro-batches of the remaining iterations; None on a rank that reads no data."""
    batches = read(run.datasets[0], run.config, run.state.consumed_samples, skips, run.micro_batches)
    for each in run.features:
        batches = each.batches(batches)
    return batches


class ReplicaChecks(Feature):
    """Part of a run that checks that all copies of a weight are equal.

    It checks every --check-replicas iterations, and after steps 1, 2, 4, 8, ... of this run: a shard without
    declaration, which counts as a copy, often differs after the first step, but small bf16 steps may not show it.
    """

    def __init__(self, run: Run) -> None:
        self._engine = run.engine.deepspeed
        self._interval = run.config.train.check_replicas
        self._steps = 0

    def after_step(self, step: StepResult | None, samples: SampleRange) -> None:
        self._steps += 1
        is_power_of_two = self._steps.bit_count() == 1
        if is_power_of_two or due(samples.iteration, self._interval):
            check_replicas(self._engine)


def _advance(run: Run) -> SampleRange:
    """Count the current iteration, even a skipped one, in the training state; return its number and samples."""
    state = run.state
    count = run.global_batch
    state.iteration += 1
    samples = SampleRange(state.iteration, state.consumed_samples, count)
    if is_rank_0():  # only rank 0 needs the hash: it writes the hash to the index of the checkpoint
        state.sample_hash = extend(state.sample_hash, run.datasets[0], state.consumed_samples, count)
    state.consumed_samples += count
    state.consumed_tokens += count * sum(run.sample_shape)
    return samples


def _skips(run: Run) -> Callable[[int], bool] | None:
    """Return a function that returns True if a --skip-* flag skips an iteration, or None without such a flag.

    The argument of the function is the number of the iteration's first sample.
    """
    t = run.config.train
    batches = run.batches
    skips = Skips(parse_ranges(t.skip_iterations or ()), parse_ranges(t.skip_samples or ()))
    iteration = run.state.iteration
    consumed = run.state.consumed_samples
    if not skips.iterations and not skips.samples:
        return None

    def skips_iteration(first: int) -> bool:
        number = iteration + batches.iterations(consumed, first) + 1
        return skips.hold(number, first, batches.size_at(first))

    return skips_iteration
