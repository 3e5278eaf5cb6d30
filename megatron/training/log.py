"""Hook that logs the progress of a run to the console and to metrics.jsonl, and ends a run that cannot continue."""

import math
import time
from typing import Any

import torch
import torch.distributed as dist

from tds import optimizer_state as zero_state

from ..ranks import device as device_module
from ..ranks.errors import RunError
from ..ranks.rank_0 import print_rank_0
from ..ranks.stragglers import straggler
from .console import TimeLeft, training_line
from .corpus_losses import CorpusLosses
from .data_ranks import PaddingCount
from .engine import Step
from .expert_log import balance_of, expert_tokens
from .find_nonfinite import explain
from .health import Health, SampleRange
from .hooks import Hook, due
from .layer_log import LayerLog
from .metrics import flops_per_token
from .run_state import Run


class TrainingLog(Hook):
    """Hook that logs the mean loss and the speed since the last log line, and ends a run that cannot continue."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.layers = LayerLog(run) if run.config.log.log_layers else None
        least = zero_state.least_loss_scale(run.engine.deepspeed)
        scale = zero_state.get_loss_scaler(run.engine.deepspeed).get("cur_scale")
        self.health = Health(run.state, run.config.train.max_skipped_steps, scale, least)
        self.left = TimeLeft()
        self.corpora = CorpusLosses(run.config)
        self.padding = PaddingCount(run.config)
        self.batch = run.global_batch  # number of samples of the last iteration
        self.last = SampleRange(run.state.iteration, run.state.consumed_samples, 0)  # of the last iteration
        self.forget()
        self.restart()

    def restart(self) -> None:
        """Restart the time measurement, so that it does not include an evaluation or a save."""
        self.begin = time.perf_counter()
        self.timed = 0
        self.timed_samples = 0
        self.run.engine.busy(self.run.timers.take())
        self.run.engine.times()

    def forget(self) -> None:
        """Reset the statistics for the next log line."""
        self.losses: list[float] = []
        self.grad_norm = math.nan
        self.skipped = 0
        self.left_out = 0
        self.loss_scale: float | None = None
        self.spikes: list[dict[str, Any]] = []
        self.guarded: list[dict[str, Any]] = []
        self.added: dict[str, list[Any]] = {"z_loss": [], "router_loss": []}  # losses besides the cross entropy

    def before_step(self, iteration: int) -> None:
        first = self.run.state.consumed_samples
        before = self.batch
        self.batch = self.run.global_batch
        if self.batch != before:
            print_rank_0(
                f"iteration {iteration} (from sample {first} on): the global batch changes from {before} to "
                f"{self.batch} samples ({self.run.micro_batches(first)} micro-batches on each replica)"
            )

    def after_step(self, step: Step | None, samples: SampleRange) -> None:
        self.last = samples
        if step is None:
            self.check()
            self.health.skip(self.run.state)
            self.left_out += 1
            print_rank_0(f"{samples} is skipped, as --skip-iterations or --skip-samples lists it")
        else:
            self.health.add(step, samples, self.run.state)
            self.loss_scale = step.loss_scale
            for name, values in self.added.items():
                values += [step.aux[name]] if name in step.aux else []
            self.corpora.add(step)
            self.timed += 1
            self.timed_samples += samples.samples
        if (
            due(samples.iteration, self.run.resolved.log_interval)
            or samples.iteration == self.run.config.train.train_iters
        ):
            self.report()

    @property
    def has_unreported(self) -> bool:
        """True if `check` has read results of iterations that no log line has reported yet."""
        return bool(self.losses or self.skipped or self.left_out)

    def check(self) -> None:
        """Copy to the host what was recorded since the last call. Raises RunError if the run must end."""
        found = self.health.read()
        self.losses += found.losses
        self.skipped += found.skipped
        if found.norms or found.skipped:
            self.grad_norm = found.norms[-1] if found.norms else math.inf
        for samples, loss, median in found.spikes:
            print_rank_0(
                f"warning: the loss jumped to {loss:.4f} at {samples}; the median of recent losses is {median:.4f}"
            )
            self.spikes.append({**samples._asdict(), "lm_loss": loss, "median": median})
        for samples, spike in found.guarded:
            print_rank_0(f"{samples} is skipped, as --skip-step-sigma asks: {spike}")
            self.guarded.append({**samples._asdict(), **spike._asdict()})
        if self.health.fault:
            raise RunError(explain(self.run, self.health.fault))

    def _of_layers(self) -> dict[str, Any]:
        """Return the entries of a row that have numbers of layers and experts. Collective over the pipeline stages."""
        layers: dict[str, Any] = dict(self.layers.found) if self.layers else {}
        if self.run.config.model.num_experts is None:
            return {"layers": layers} if layers else {}
        tokens = expert_tokens(self.run.engine.deepspeed.module)
        layers |= {name: layers.get(name, {}) | balance_of(each) for name, each in tokens.items()}
        return {"layers": layers, "expert_tokens": tokens}

    def report(self) -> None:
        """Print a log line and write a row of metrics.jsonl. A collective that waits for the device."""
        run = self.run
        config = self.run.config
        self.check()
        device_module.synchronize(run.device)
        elapsed = time.perf_counter() - self.begin
        seconds = elapsed / max(self.timed, 1)
        tokens_per_second = self.timed_samples * sum(run.sample_shape) / elapsed if elapsed else 0.0
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
            "lr": run.lr(self.last.iteration - 1, self.last.first_sample),
            "grad_norm": self.grad_norm,
            "loss_scale": self.loss_scale,
            "skipped_steps": self.skipped,
            "tokens_per_second": tokens_per_second,
            "tflops": tflops,
            "mfu": tflops / peak if peak else None,
            "memory_mb": device_module.peak_memory_mb(run.device),
        }
        row |= {name: torch.stack(values).mean().item() for name, values in self.added.items() if values}
        if self.padding.enabled:
            row["padding"] = self.padding.take(run.device)
        row |= {"global_batch": self.batch} if len(run.batches.sizes) > 1 else {}
        row |= {"spikes": self.spikes} if self.spikes else {}
        row |= self._of_layers()
        row |= {"skipped_spikes": self.guarded} if self.guarded else {}
        row |= {"passed_over": self.left_out} if self.left_out else {}
        timed = run.timers.take()
        behind = straggler(run.engine.busy(timed) / max(self.timed, 1), seconds, run.device)
        row |= {"straggler": behind._asdict()} if behind else {}
        waits = f" | rank {behind.rank} takes {behind.factor:.1f} times the median of its peers" if behind else ""
        last = config.train.train_iters
        samples = run.state.consumed_samples
        whole = run.batches.after(samples, last - run.state.iteration)
        left = self.left.after(samples, whole, elapsed / max(self.timed_samples, 1))
        print_rank_0(training_line(row, last, seconds, left, run.config.log.log_details) + waits)
        if run.resolved.wall_clock_breakdown and self.timed:
            row["timers_ms"] = {name: 1e3 * s / max(self.timed, 1) for name, s in (timed | run.engine.times()).items()}
            print_rank_0("   per iteration: " + ", ".join(f"{n} {ms:.1f} ms" for n, ms in row["timers_ms"].items()))
        run.metrics.write(row)
        for each in self.corpora.rows(run.state.iteration):
            run.metrics.write(each)
        self.forget()
        self.restart()
