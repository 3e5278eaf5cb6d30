"""The training loop: iterations from the resumed one to the last, with log lines, evaluations and saves."""

import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from tds import optimizer_state as zero_state
from tds import trace

from .. import mpu
from ..checkpointing import PatientSaver, TrainState
from ..config import Config
from ..config.ds_config import Resolved
from ..data.sample_hash import extend
from ..data.skips import Skips, parse_ranges
from ..optim import lr_at
from ..ranks import device as device_module
from ..ranks.agreement import check_replicas
from ..ranks.errors import RunError
from ..ranks.objects import from_rank_0
from ..ranks.rank_0 import is_rank_0, print_rank_0
from ..ranks.signals import StopSignal, StopSignals
from ..ranks.stragglers import straggler
from ..tokenizer import Tokenizer
from . import find_nonfinite
from .console import TimeLeft, training_line
from .data_ranks import lengths_of, read
from .engine import Engine, Step
from .gc_interval import Garbage
from .gradient_watch import GradientWatch
from .health import Fault, Health, SampleRange
from .metrics import MetricsWriter, Timers, flops_per_token
from .run_folder import release
from .run_lock import RunLock
from .task import Datasets
from .timeline import recorded


@dataclass
class Run:
    """Everything that belongs to one run."""

    config: Config
    resolved: Resolved
    device: torch.device
    engine: Engine
    datasets: Datasets
    state: TrainState
    saver: PatientSaver
    timers: Timers
    metrics: MetricsWriter
    tokenizer: Tokenizer
    run_dir: Path
    parameters: int  # size of the whole model, with tied parameters counted once
    locks: list[RunLock]  # empty on ranks other than 0

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        """Close the run's files and unlock its directory."""
        self.metrics.close()
        release(self.locks)

    @property
    def sample_shape(self) -> tuple[int, int]:
        """Tokens of a sample: (encoder or whole sequence, decoder)."""
        return lengths_of(self.datasets[0]) or (self.config.data.seq_length, 0)

    @property
    def global_batch(self) -> int:
        """Samples of an iteration, over all replicas."""
        return self.config.train_batch_size(dist.get_world_size())


DONE = (
    "trained {} of --train-iters {} iterations already; raise it to go on, with --override-lr-schedule unless the learning rate "
    "is to stay where its schedule has ended"
)


def train(run: Run) -> None:
    """Train up to --train-iters, with evaluations and saves. Raises RunError if the run cannot continue."""
    state, config = run.state, run.config
    last = config.train.train_iters
    if state.iteration >= last:
        print_rank_0(DONE.format(state.iteration, last))
    passed_over = _passed_over(run)
    batches = read(run.datasets[0], config, state.consumed_samples, passed_over) if state.iteration < last else None
    window = _Window(run)
    saved = began = state.iteration  # iteration of the newest saved state, and iteration at which its save began
    watch: GradientWatch | None = GradientWatch(run.engine.deepspeed.module)
    bar = tqdm(total=last, initial=min(state.iteration, last), disable=not is_rank_0() or None, unit="it", leave=False)
    garbage = Garbage(config.train.manual_gc_interval)
    signals_of = StopSignals(config.checkpoint.exit_duration_in_mins, run.device)
    with (
        recorded(config, run.run_dir, run.engine.deepspeed, state.iteration) as recorder,
        bar,
        garbage,
        signals_of as signals,
    ):
        asked = StopSignal.NOTHING
        while state.iteration < last and asked is not StopSignal.SAVE_AND_STOP:
            if recorder and recorder.iteration(state.iteration + 1):
                window.restart()
            if passed_over and passed_over(state.consumed_samples):
                window.pass_over(_advance(run))
            else:
                mpu.get_rng().begin(state.iteration)
                step = run.engine.train_batch(batches, lr_at(state.iteration, config))
                if watch:
                    _first_step(run, watch, step)
                    watch = None
                window.add(step, _advance(run))
            bar.update()
            garbage.after(state.iteration)
            if due(state.iteration, config.train.check_replicas):
                check_replicas(run.engine.deepspeed)
            if due(state.iteration, run.resolved.log_interval) or state.iteration == last:
                window.report()
            if due(state.iteration, config.train.eval_interval) and state.iteration < last:
                window.check()
                with trace.span("evaluation"):
                    evaluate(run, "valid")
                window.restart()
            asked, written = signals.agree(run.saver.pending and not run.saver.busy)
            if due(state.iteration, config.checkpoint.exit_interval or 0):
                asked = StopSignal.SAVE_AND_STOP
            if run.saver.pending and written and state.iteration > began + 1:  # `written` may be of the previous save
                run.saver.finish()
            if due(state.iteration, config.checkpoint.save_interval) or asked is not StopSignal.NOTHING:
                began, saved = state.iteration, window.save(saved, must=asked is StopSignal.SAVE_AND_STOP)
    if run.saver.pending:
        run.saver.finish()
    if state.iteration < last:
        print_rank_0(f"asked to stop after iteration {state.iteration}; the same command continues")
        return
    if (state.iteration != saved or run.saver.failures) and config.checkpoint.save_at_end:
        window.save(saved, must=True)
    for part in ("valid", "test"):
        _evaluate_once(run, part)


def _evaluate_once(run: Run, part: str) -> None:
    """Evaluate unless metrics.jsonl holds the result, as after restarting a finished run; alike on all ranks."""
    if from_rank_0(run.metrics.holds(part, run.state.iteration)):
        print_rank_0(
            f"note: {run.run_dir}/metrics.jsonl holds the {part} loss of iteration {run.state.iteration} already"
        )
    else:
        evaluate(run, part)


def _advance(run: Run) -> SampleRange:
    """Count an iteration and its samples, whether trained on or skipped."""
    state, count = run.state, run.global_batch
    state.iteration += 1
    taken = SampleRange(state.iteration, state.consumed_samples, count)
    if is_rank_0():  # only rank 0 writes the index of checkpoints
        state.sample_hash = extend(state.sample_hash, run.datasets[0], state.consumed_samples, count)
    state.consumed_samples += count
    state.consumed_tokens += count * sum(run.sample_shape)
    return taken


def _first_step(run: Run, watch: GradientWatch, step: Step) -> None:
    if run.config.train.keep_freed_memory:  # moments are allocated by now, and each step allocates the same
        device_module.keep_freed_memory(run.device)
    for warning in watch.warnings(step):
        print_rank_0(warning)


def _passed_over(run: Run) -> Callable[[int], bool] | None:
    """Return a predicate on an iteration's first sample: whether a --skip-* flag skips it; None without these flags."""
    t, count = run.config.train, run.global_batch
    skips = Skips(parse_ranges(t.skip_iterations or ()), parse_ranges(t.skip_samples or ()))
    iteration, consumed = run.state.iteration, run.state.consumed_samples
    if not skips.iterations and not skips.samples:
        return None
    return lambda first: skips.hold(iteration + (first - consumed) // count + 1, first, count)


def due(iteration: int, interval: int) -> bool:
    """Return whether an event that recurs every `interval` iterations is due; an interval of 0 means never."""
    return interval > 0 and iteration % interval == 0


def evaluate(run: Run, part: str) -> float | None:
    """Return the mean loss per target token over --eval-iters global batches, always the same ones; None without data.

    If the model distinguishes text tokens, their loss and accuracy are reported too.
    """
    dataset = run.datasets[("train", "valid", "test").index(part)]
    iterations = run.config.train.eval_iters
    if dataset is None or not iterations:
        return None
    batches = read(dataset, run.config, 0)
    sums: defaultdict[str, float] = defaultdict(float)
    for _ in range(iterations):
        for name, value in run.engine.eval_batch(batches).items():
            sums[name] += value
    loss = sums["loss"] / sums["targets"]
    row = {"split": part, "iteration": run.state.iteration, "lm_loss": loss, "ppl": math.exp(min(loss, 700))}
    line = f"iteration {run.state.iteration:7d} | {part} loss {loss:.4f} | ppl {row['ppl']:.2f}"
    if tokens := sums["text_tokens"]:
        row |= {"text_loss": sums["text_loss"] / tokens, "text_accuracy": sums["text_right"] / tokens}
        line += f" | text loss {row['text_loss']:.4f} | text accuracy {row['text_accuracy']:.1%}"
    print_rank_0(line)
    run.metrics.write(row)
    return loss


class _Window:
    """The iterations since the last log line: mean loss, speed, and whether the run may continue."""

    def __init__(self, run: Run) -> None:
        self.run = run
        least = zero_state.least_loss_scale(run.engine.deepspeed)
        scale = zero_state.get_loss_scaler(run.engine.deepspeed).get("cur_scale")
        self.health = Health(run.state, run.config.train.max_skipped_steps, scale, least)
        self.left = TimeLeft()
        self.forget()
        self.restart()

    def restart(self) -> None:
        """Restart the timing, so that an evaluation or a save does not count in the speed and the time breakdown."""
        self.begin, self.timed = time.perf_counter(), 0
        self.run.engine.busy(self.run.timers.take())
        self.run.engine.times()

    def forget(self) -> None:
        """Reset the statistics for the next log line."""
        self.losses: list[float] = []
        self.grad_norm, self.skipped, self.left_out = math.nan, 0, 0
        self.loss_scale: float | None = None
        self.spikes: list[dict[str, Any]] = []
        self.z_losses: list[Any] = []

    def add(self, step: Step, taken: SampleRange) -> None:
        self.health.add(step, taken, self.run.state)
        self.loss_scale = step.loss_scale
        self.z_losses += [step.aside["z_loss"]] if "z_loss" in step.aside else []
        self.timed += 1

    def pass_over(self, taken: SampleRange) -> None:
        """Record and report an iteration that was skipped on request."""
        self.check()
        self.health.passed_over(self.run.state)
        self.left_out += 1
        print_rank_0(f"{taken} is passed over, as --skip-iterations or --skip-samples says")

    def check(self) -> None:
        """Read the losses and norms since the last call in one transfer. Raises RunError if the run must end."""
        found = self.health.read()
        self.losses += found.losses
        self.skipped += found.skipped
        if found.norms or found.skipped:
            self.grad_norm = found.norms[-1] if found.norms else math.inf
        for taken, loss, median in found.spikes:
            print_rank_0(f"warning: the loss jumped to {loss:.4f} at {taken}; the median before is {median:.4f}")
            self.spikes.append({**taken._asdict(), "lm_loss": loss, "median": median})
        if self.health.fault:
            # The pending save is of an earlier, healthy iteration.
            if self.run.saver.pending:
                self.run.saver.finish()
            raise RunError(_sentence(self.run, self.health.fault))

    def save(self, saved: int, must: bool = False) -> int:
        """Save the state after the last applied step unless it is iteration `saved`; return the newest saved iteration.

        Skipped steps therefore neither save nor prune anything.
        must: see PatientSaver.save. It is set before the run stops, when iterations since the last log line
        still get one.
        """
        self.check()
        if must and (self.losses or self.skipped or self.left_out):
            self.report()
        good = self.health.worth_saving(self.run.state)
        if good.iteration != self.run.state.iteration:
            print_rank_0(f"no step was applied since iteration {good.iteration}, which is what a checkpoint can hold")
        if good.iteration != saved or self.run.saver.failures:
            with trace.span("checkpoint"):
                self.run.saver.save(good, must=must)
        self.restart()
        return good.iteration

    def report(self) -> None:
        run, config = self.run, self.run.config
        self.check()
        device_module.synchronize(run.device)
        seconds = (time.perf_counter() - self.begin) / max(self.timed, 1)
        tokens_per_second = run.global_batch * sum(run.sample_shape) / seconds if seconds and self.timed else 0.0
        ranks = dist.get_world_size()
        tflops = flops_per_token(run.parameters, config, *run.sample_shape) * tokens_per_second / ranks / 1e12
        peak = device_module.peak_tflops(run.device)
        loss = sum(self.losses) / len(self.losses) if self.losses else math.nan
        row: dict[str, Any] = {
            "split": "train",
            "iteration": run.state.iteration,
            "consumed_samples": run.state.consumed_samples,
            "consumed_tokens": run.state.consumed_tokens,
            "lm_loss": loss,
            "lr": lr_at(run.state.iteration - 1, config),
            "grad_norm": self.grad_norm,
            "loss_scale": self.loss_scale,
            "skipped_steps": self.skipped,
            "tokens_per_second": tokens_per_second,
            "tflops": tflops,
            "mfu": tflops / peak if peak else None,
            "memory_mb": device_module.peak_memory_mb(run.device),
        }
        z_loss = torch.stack(self.z_losses).mean().item() if self.z_losses else None
        row |= {} if z_loss is None else {"z_loss": z_loss}
        row |= {"spikes": self.spikes} if self.spikes else {}
        row |= {"passed_over": self.left_out} if self.left_out else {}
        timed = run.timers.take()
        behind = straggler(run.engine.busy(timed) / max(self.timed, 1), seconds, run.device)
        row |= {"straggler": behind._asdict()} if behind else {}
        waits = f" | rank {behind.rank} takes {behind.factor:.1f} times the median" if behind else ""
        last = config.train.train_iters
        left = self.left.after(run.state.iteration, last, seconds)
        print_rank_0(training_line(row, last, seconds, left, run.config.log.log_details) + waits)
        if run.resolved.wall_clock_breakdown and self.timed:
            row["timers_ms"] = {name: 1e3 * s / max(self.timed, 1) for name, s in (timed | run.engine.times()).items()}
            print_rank_0("   per iteration: " + ", ".join(f"{n} {ms:.1f} ms" for n, ms in row["timers_ms"].items()))
        run.metrics.write(row)
        self.forget()
        self.restart()


GENTLER = "a lower --lr or a longer --warmup (with --override-lr-schedule, as a checkpoint keeps its own)"


def _sentence(run: Run, fault: Fault) -> str:
    """Return why the run ends and what the user can do; recomputes the iteration to name a rank and a parameter."""
    taken, t = fault.taken, run.config.train

    def again() -> None:
        mpu.get_rng().begin(taken.iteration - 1)
        run.engine.train_batch(read(run.datasets[0], run.config, taken.first_sample), 0.0)

    if not fault.streak:
        return f"the loss became {fault.loss} at {taken}, its gradient did not; {GENTLER} may help"
    found = find_nonfinite.find(run.engine.deepspeed.module, again)
    why = find_nonfinite.words(found, taken.first_sample, t.batch_size * t.gas)
    begin = taken.iteration - fault.streak + 1
    skip = f"--skip-iterations {begin}-{taken.iteration} goes on past them, {GENTLER} may keep them away"
    if fault.scale is not None:
        return (
            f"the loss scale of fp16 is at its minimum {fault.scale:g}, and still the gradient overflows at {taken}: {why}; "
            f"take --precision bf16 or fp32, or {GENTLER}"
        )
    return f"{fault.streak} steps in a row were not applied, the last one at {taken}: {why}; {skip}"
