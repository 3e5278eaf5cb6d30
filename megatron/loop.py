"""The training loop: iterations from the resumed one to the last, with lines, evaluations and saves on the way."""

import math
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from . import device as device_module
from . import mpu
from .checkpointing import PatientSaver, TrainState
from .config import Config
from .data.position import extend
from .data.sampler import ConsecutiveSampler, build_loader
from .ds_config import Resolved
from .engine import Batches, Engine, Step
from .gradient_watch import GradientWatch
from .metrics import MetricsWriter, Timers, flops_per_token
from .optim import lr_at
from .run_folder import release
from .run_lock import RunLock
from .runtime import RunError, is_rank_0, print_rank_0
from .stopping import Wish, Wishes
from .tokenizer import Tokenizer

Datasets = tuple[Any, Any, Any]


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
    parameters: int  # of the whole model, tied ones once
    locks: list[RunLock]  # on rank 0

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        """Close its files, and let another run have its directory."""
        self.metrics.close()
        release(self.locks)

    @property
    def sample_shape(self) -> tuple[int, int]:
        """Tokens of a sample: (of the encoder or of the whole, of the decoder)."""
        plan = getattr(self.datasets[0], "plan", None)
        return (plan.encoder, plan.decoder) if plan else (self.config.data.seq_length, 0)

    @property
    def global_batch(self) -> int:
        return self.config.train_batch_size(dist.get_world_size())


def data_iterator(run: Run, dataset: Any, consumed_samples: int) -> Batches | None:
    """Micro-batches for this rank; None where it gets its data from another rank or needs none."""
    mesh = mpu.get_mesh()
    reads = mesh.model.rank == 0 and mesh.pipe.rank in (0, mesh.pipe.size - 1)
    if not reads:
        return None
    t = run.config.train
    sampler = ConsecutiveSampler(t.batch_size, t.gas, mesh.data.rank, mesh.data.size, consumed_samples)
    return iter(build_loader(dataset, sampler, run.config.data.num_workers))


def train(run: Run) -> None:
    """Train up to --train-iters, evaluating and saving on the way and at the end."""
    state, config = run.state, run.config
    last = config.train.train_iters
    if state.iteration >= last:
        print_rank_0(f"trained {state.iteration} of --train-iters {last} iterations already; raise it to go on")
    batches = data_iterator(run, run.datasets[0], state.consumed_samples) if state.iteration < last else None
    window = _Window(run)
    start = saved = state.iteration
    watch = GradientWatch(run.engine.deepspeed.module)
    bar = tqdm(total=last, initial=min(state.iteration, last), disable=not is_rank_0() or None, unit="it", leave=False)
    with bar, Wishes(config.checkpoint.exit_duration_in_mins) as wishes:
        wish = Wish.NOTHING
        while state.iteration < last and wish is not Wish.SAVE_AND_STOP:
            mpu.get_mesh().rng.begin(state.iteration)
            step = run.engine.train_batch(batches, lr_at(state.iteration, config))
            if state.iteration == start:
                if config.train.keep_freed_memory:  # now that moments have their place and each step asks for the same
                    device_module.keep_freed_memory(run.device)
                for warning in watch.warnings(step):
                    print_rank_0(warning)
            state.iteration += 1
            state.sample_hash = extend(state.sample_hash, run.datasets[0], state.consumed_samples, run.global_batch)
            state.consumed_samples += run.global_batch
            state.consumed_tokens += run.global_batch * sum(run.sample_shape)
            bar.update()
            window.add(step)
            if due(state.iteration, run.resolved.log_interval) or state.iteration == last:
                window.report(step, lr_at(state.iteration - 1, config))
            if due(state.iteration, config.train.eval_interval) and state.iteration < last:
                window.check()
                evaluate(run, "valid")
                window.restart()
            wish, written = wishes.agree(run.saver.pending and not run.saver.busy)
            if due(state.iteration, config.checkpoint.exit_interval or 0):
                wish = Wish.SAVE_AND_STOP
            if run.saver.pending and written:
                run.saver.finish()
            if due(state.iteration, config.checkpoint.save_interval) or wish is not Wish.NOTHING:
                window.check()
                run.saver.save(state, must=wish is Wish.SAVE_AND_STOP)
                saved = state.iteration
                window.restart()
    if run.saver.pending:
        run.saver.finish()
    if state.iteration < last:
        print_rank_0(f"asked to stop after iteration {state.iteration}; the same command continues")
        return
    if (state.iteration != saved or run.saver.failures) and config.checkpoint.save_at_end:
        run.saver.save(state, must=True)
    evaluate(run, "valid")
    evaluate(run, "test")


def due(iteration: int, interval: int) -> bool:
    return interval > 0 and iteration % interval == 0


def evaluate(run: Run, part: str) -> float | None:
    """Mean loss per target token over --eval-iters global batches, always the same ones. None where the part is empty.

    Where the model tells them apart, loss and share of right guesses of text tokens are reported, too.
    """
    dataset = run.datasets[("train", "valid", "test").index(part)]
    iterations = run.config.train.eval_iters
    if dataset is None or not iterations:
        return None
    batches = data_iterator(run, dataset, 0)
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
    """The iterations since the last line: mean loss and speed."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.losses: list[Tensor] = []
        self.checked: list[bool] = []  # of each loss, whether it has to be a number
        self.restart()

    def restart(self) -> None:
        """Leave what happened between two lines (an evaluation, a save) out of the speed."""
        self.begin, self.timed = time.perf_counter(), 0

    def add(self, step: Step) -> None:
        """Keep the loss, unread: reading it would make this process wait for the device."""
        self.losses.append(step.loss)
        self.checked.append(not step.skipped)
        self.timed += 1

    def check(self) -> list[float]:
        """The losses since the last line. Raises RunError if one is not a number, so that none is saved behind it."""
        losses: list[float] = torch.stack(self.losses).tolist() if self.losses else []
        for at, (loss, checked) in enumerate(zip(losses, self.checked, strict=True)):
            if checked and not math.isfinite(loss):
                iteration = self.run.state.iteration - len(losses) + at + 1
                raise RunError(f"the loss became {loss} at iteration {iteration}; lower --lr or raise --warmup")
        return losses

    def report(self, step: Step, lr: float) -> None:
        run, config = self.run, self.run.config
        losses = self.check()
        device_module.synchronize(run.device)
        seconds = (time.perf_counter() - self.begin) / max(self.timed, 1)
        tokens_per_second = run.global_batch * sum(run.sample_shape) / seconds if seconds and self.timed else 0.0
        ranks = dist.get_world_size()
        tflops = flops_per_token(run.parameters, config, *run.sample_shape) * tokens_per_second / ranks / 1e12
        peak = device_module.peak_tflops(run.device)
        loss, grad_norm = sum(losses) / len(losses), float(step.grad_norm)
        row: dict[str, Any] = {
            "split": "train",
            "iteration": run.state.iteration,
            "consumed_samples": run.state.consumed_samples,
            "consumed_tokens": run.state.consumed_tokens,
            "lm_loss": loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "loss_scale": step.loss_scale,
            "tokens_per_second": tokens_per_second,
            "tflops": tflops,
            "mfu": tflops / peak if peak else None,
            "memory_mb": device_module.peak_memory_mb(run.device),
        }
        scale = "" if step.loss_scale is None else f" | loss scale {step.loss_scale:g}"
        print_rank_0(
            f"iteration {run.state.iteration:7d}/{config.train.train_iters} | loss {loss:.4f} | lr {lr:.2e} | "
            f"grad norm {grad_norm:.3f}{scale} | {tokens_per_second:,.0f} tokens/s | {seconds * 1e3:.0f} ms"
        )
        timed = run.timers.take()
        if run.resolved.wall_clock_breakdown and self.timed:
            row["timers_ms"] = {name: 1e3 * s / max(self.timed, 1) for name, s in timed.items()}
            print_rank_0("   per iteration: " + ", ".join(f"{n} {ms:.1f} ms" for n, ms in row["timers_ms"].items()))
        run.metrics.write(row)
        self.losses, self.checked = [], []
        self.restart()
