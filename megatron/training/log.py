"""The log of a run on the console and in metrics.jsonl; it also ends a run that cannot continue."""

import math
import time
from typing import Any

import torch
import torch.distributed as dist

from tds import optimizer_state as zero_state

from .. import mpu
from ..engines.engine import StepResult
from ..model.work import flops_per_token
from ..ranks import device as device_module
from ..ranks.errors import RunError
from ..ranks.rank_0 import print_rank_0
from .console import TimeLeft, training_line
from .feature import Feature, Interval, due
from .health import Health, SampleRange
from .remote_datasets import begins_stage
from .run_state import Run


class TrainingLog(Feature):
    """Part of a run that logs mean loss and speed since the last log line, and ends a run that cannot continue."""

    def __init__(self, run: Run) -> None:
        self.run = run
        engine = run.engine.deepspeed
        min_scale = zero_state.least_loss_scale(engine)
        scaler = zero_state.get_loss_scaler(engine)
        # SGD and frozen weights have no step count, but the scaler knows how long ago it lowered the scale.
        scaled = scaler.get("cur_iter", 0)  # steps of the scaler, which is new if the run was not in fp16 before
        taken = scaled - scaler.get("last_overflow_iter", -1) - 1
        has_stepped = min(scaled, max(taken, zero_state.get_step(engine))) > 0
        max_skipped = run.config.train.max_skipped_steps
        self.health = Health(run.state, max_skipped, scaler.get("cur_scale"), min_scale, has_stepped)
        self.time_left = TimeLeft()
        self.batch_samples = run.global_batch_size  # number of samples of the last iteration
        self.last_samples = SampleRange(run.state.iteration, run.state.consumed_samples, 0)  # of the last iteration
        self.reset_statistics()
        self.restart_timer()

    def restart_timer(self) -> None:
        """Restart the time measurement, so that it does not include an evaluation or a save since the last `check`."""
        self.start_time = time.perf_counter()
        self.timed_steps = 0
        self.timed_samples = 0
        # These three methods return what was measured since their last call. Call them to discard it. Some engines
        # compute `busy` from the timed parts.
        timed_parts = self.run.timers.take()
        self.run.engine.busy(timed_parts)
        self.run.engine.times()

    def reset_statistics(self) -> None:
        """Reset the statistics for the next log line."""
        self.seconds = 0.0  # training time between the last log line and the last `check`
        self.samples = 0  # samples trained in `seconds`
        self.losses: list[float] = []
        self.grad_norm = math.nan
        self.skipped = 0
        self.skipped_by_flag = 0  # iterations that --skip-iterations or --skip-samples lists
        self.loss_scale: float | None = None
        self.spikes: list[dict[str, Any]] = []
        self.aux_losses: dict[str, list[Any]] = {"z_loss": [], "router_loss": []}  # losses besides the cross entropy

    def before_step(self, iteration: int) -> None:
        first_sample = self.run.state.consumed_samples
        before = self.batch_samples
        self.batch_samples = self.run.global_batch_size
        if begins_stage(self.run.datasets[0], range(first_sample, first_sample + self.batch_samples)):
            self.check()  # compares the losses of the last stage among each other
            self.health.recent_losses.clear()
        if self.batch_samples != before:
            print_rank_0(
                f"iteration {iteration} (from sample {first_sample} on): the global batch changes from {before} to "
                f"{self.batch_samples} samples ({self.run.num_micro_batches(first_sample)} micro-batches on each "
                "replica)"
            )

    def after_step(self, step: StepResult | None, samples: SampleRange) -> None:
        self.last_samples = samples
        state = self.run.state
        state.features = {}  # `health` copies the reference; `Saves` fills the dict after the parts that follow the log
        if step is None:
            self.check()
            self.health.skip(state)
            self.skipped_by_flag += 1
            # DeepSpeed, whose monitors use this number, has not seen these samples.
            self.run.engine.deepspeed.global_samples += samples.samples * mpu.get_mesh().context.size
            print_rank_0(f"{samples} is skipped, as --skip-iterations or --skip-samples lists it")
        else:
            self.health.add(step, samples, state)
            self.loss_scale = step.loss_scale
            for name, values in self.aux_losses.items():
                if name in step.aux:
                    values.append(step.aux[name])
            self.timed_steps += 1
            self.timed_samples += samples.samples
        if self.is_due(samples.iteration):
            self.report()

    def is_due(self, iteration: int) -> bool:
        """Return True if a log line follows iteration `iteration`, unless the run stops before."""
        is_last = iteration == self.run.config.train.train_iters
        return is_last or due(iteration, self.run.resolved.log_interval)

    @property
    def has_unreported(self) -> bool:
        """True if `check` has read results of iterations that no log line has reported yet."""
        return bool(self.losses or self.skipped or self.skipped_by_flag)

    def check(self) -> None:
        """Copy to the host what was recorded since the last call, and add the time since then to `seconds`.

        Raises RunError if the run must end.
        """
        summary = self.health.read()
        self.losses += summary.losses
        self.skipped += summary.skipped
        if summary.norms:
            self.grad_norm = summary.norms[-1]
        elif summary.skipped:  # the gradients of all steps overflowed
            self.grad_norm = math.inf
        for samples, loss, median in summary.spikes:
            print_rank_0(
                f"warning: the loss jumped to {loss:.4f} at {samples}; the median of recent losses is {median:.4f}"
            )
            self.spikes.append({**samples._asdict(), "lm_loss": loss, "median": median})
        if self.health.fault:  # set by `read` above
            from .find_nonfinite import explain_fault

            raise RunError(explain_fault(self.run, self.health.fault))
        device_module.synchronize(self.run.device)
        now = time.perf_counter()
        self.seconds += now - self.start_time
        self.samples += self.timed_samples
        self.start_time = now
        self.timed_samples = 0

    def report(self) -> None:
        """Print a log line and write a row of metrics.jsonl. A collective that waits for the device."""
        run = self.run
        self.check()  # completes the statistics below, and ends the run if it must end
        steps = self.timed_steps
        sample_seconds = self.seconds / max(self.samples, 1)
        step_seconds = sample_seconds * self.batch_samples
        timed_parts = run.timers.take()
        row = self._row() | run.features.row(Interval(steps, step_seconds, timed_parts))
        last = run.config.train.train_iters
        samples = run.state.consumed_samples
        total_samples = run.batch_schedule.advance(samples, last - run.state.iteration)
        left = self.time_left.estimate(samples, total_samples, sample_seconds)
        milliseconds: dict[str, float] = {}
        if run.resolved.wall_clock_breakdown and steps:
            timed_parts |= run.engine.times()
            milliseconds = {name: 1e3 * spent / steps for name, spent in timed_parts.items()}
            row["timers_ms"] = milliseconds
        new_rows = [row]
        for feature in run.features:
            new_rows += feature.rows(run.state.iteration)
        for new_row in new_rows:
            run.features.finish(new_row)
            run.metrics.write(new_row)
        if "lm_loss" in row:  # not if flags skipped all iterations since the last log line
            print_rank_0(training_line(row, last, step_seconds, left, run.config.log.log_details))
        if milliseconds:
            words = [f"{name} {spent:.1f} ms" for name, spent in milliseconds.items()]
            print_rank_0("   per iteration: " + ", ".join(words))
        self.reset_statistics()
        self.restart_timer()

    def _row(self) -> dict[str, Any]:
        """Return the entries of a row that every run has."""
        run = self.run
        sample_tokens = sum(run.sample_shape)  # of a T5, encoder and decoder tokens
        tokens_per_second = self.samples * sample_tokens / self.seconds if self.seconds else 0.0
        flops = flops_per_token(run.parameters, run.config, *run.sample_shape)
        tflops = flops * tokens_per_second / dist.get_world_size() / 1e12
        peak = device_module.peak_tflops(run.device)
        row: dict[str, Any] = {
            "split": "train",
            "iteration": run.state.iteration,
            "consumed_samples": run.state.consumed_samples,
            "consumed_tokens": run.state.consumed_tokens,
            "lm_loss": sum(self.losses) / len(self.losses) if self.losses else math.nan,
            "lr": run.lr(self.last_samples.iteration - 1, self.last_samples.first_sample),  # `lr` counts from 0
            "grad_norm": self.grad_norm,
            "loss_scale": self.loss_scale,
            "skipped_steps": self.skipped,
            "tokens_per_second": tokens_per_second,
            "tflops": tflops,
            "mfu": tflops / peak if peak else None,
            "memory_mb": device_module.peak_memory_mb(run.device),
        }
        for name, values in self.aux_losses.items():
            if values:
                means = torch.stack(values)
                row[name] = means[means.isfinite()].mean().item()  # as for lm_loss, the mean of the finite values
        if run.config.train.batch_size_schedule:
            row["global_batch"] = self.batch_samples
        if self.spikes:
            row["spikes"] = self.spikes
        if self.skipped_by_flag:
            row["passed_over"] = self.skipped_by_flag
        if not self.losses and not self.skipped:  # all iterations were skipped by flags, so there is no loss
            del row["lm_loss"]
            del row["grad_norm"]
        return row
