"""The training loop, which calls the parts of a run around each iteration."""

from tqdm import tqdm

from .. import mpu
from ..data.sample_hash import extend_hash
from ..data.skips import make_skip_check
from ..engines.engine import Batches, StepResult
from ..locks.held_places import HeldPlaces
from ..ranks.rank_0 import is_rank_0, print_rank_0
from .data_ranks import read_batches
from .evaluation import Evaluations, evaluate
from .feature import Feature
from .health import ReplicaChecks, SampleRange
from .log import TrainingLog
from .run_state import Run
from .saves import Saves

__all__ = ["Run", "evaluate", "train"]


def train(run: Run) -> None:
    """Train up to --train-iters, with evaluations and saves. Raises RunError if the run cannot continue.

    Each iteration calls `before_step` of all parts of the run, takes an optimizer step (unless a --skip-* flag skips
    the iteration), and calls `after_step` of all parts: the features, the log, evaluations and saves, in this order.
    The last part, `Saves`, decides whether the run stops early.
    """
    state = run.state
    train_iters = run.config.train.train_iters
    if state.iteration >= train_iters:
        length_flag = "--train-samples" if run.config.train.train_samples else "--train-iters"
        print_rank_0(
            f"the run has already trained {state.iteration} of --train-iters {train_iters} iterations; to train "
            f"further, raise {length_flag} and pass --override-lr-schedule, or the learning rate stays at the end of "
            "its schedule"
        )
    should_skip = make_skip_check(run.config.train, run.batch_schedule, state.iteration, state.consumed_samples)
    run.log = TrainingLog(run)
    parts, saves = _collect_parts(run)
    disable = None if is_rank_0() else True  # None: disabled if the output is no terminal
    bar = tqdm(total=train_iters, initial=min(state.iteration, train_iters), disable=disable, unit="it", leave=False)
    # This starts the data workers, on purpose before `run.signals` changes the signal handlers.
    batches: Batches | None = None
    if state.iteration < train_iters:
        batches = read_batches(run.datasets[0], run.config, state.consumed_samples, should_skip, run.num_micro_batches)
        for feature in run.features:
            batches = feature.batches(batches)
    with bar, run.signals, run.features.running(run), saves:
        while state.iteration < train_iters and not run.stop:
            for part in parts:
                part.before_step(state.iteration + 1)
            step = None  # for an iteration that a --skip-* flag skips
            if not should_skip(state.consumed_samples):
                step = _train_step(run, batches)
            samples = _advance_state(run)
            bar.update()
            for part in parts:
                part.after_step(step, samples)
    saves.complete()  # finishes a save in the background, and saves the final state if it is not saved yet
    if state.iteration < train_iters:
        print_rank_0(f"stopped after iteration {state.iteration} as requested; run the same command to resume")
        return
    for part in parts:  # only if all iterations are done
        part.end()


def _train_step(run: Run, batches: Batches | None) -> StepResult:
    """Take an optimizer step on the next global batch."""
    state = run.state
    mpu.get_rng().begin(state.iteration)  # a resumed run thus has the dropout masks of an uninterrupted one
    lr = run.lr(state.iteration, state.consumed_samples)
    return run.engine.train_batch(batches, lr, run.num_micro_batches(state.consumed_samples))


def _collect_parts(run: Run) -> tuple[list[Feature], Saves]:
    """Return all parts of a run, in the order in which an iteration calls them, and the last of them."""
    places = HeldPlaces(run)  # stops the run if it loses the lock of a folder
    saves = Saves(run, places)
    before_log = [feature for feature in run.features if not feature.after_log]
    after_log = [feature for feature in run.features if feature.after_log]
    return [places, *before_log, ReplicaChecks(run), run.log, Evaluations(run), *after_log, saves], saves


def _advance_state(run: Run) -> SampleRange:
    """Count the current iteration, even a skipped one, in the training state; return its number and samples."""
    state = run.state
    count = run.global_batch_size
    state.iteration += 1
    samples = SampleRange(state.iteration, state.consumed_samples, count)
    if is_rank_0():  # only rank 0 needs the hash: it writes the hash to the index of the checkpoint
        state.sample_hash = extend_hash(state.sample_hash, run.datasets[0], state.consumed_samples, count)
    state.consumed_samples += count
    state.consumed_tokens += count * sum(run.sample_shape)  # a T5 sample has encoder and decoder tokens
    return samples
