"""The training loop: `pretrain()` is the whole of a run, from a command line to a trained checkpoint."""

import gc
import json
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

import tds

from . import device as device_module
from . import mpu
from .arguments import build_parser, parse, with_values
from .checkpointing import Saver, TrainState, start_or_resume
from .compiling import compile_layers
from .config import Config
from .data.corpora import prefixes_of
from .data.position import extend
from .data.sampler import ConsecutiveSampler, build_loader
from .ds_config import Resolved, resolve
from .engine import Batches, CountTargets, Engine, ForwardStep, Step, build_engine
from .gradient_watch import GradientWatch
from .initialize import initialize_megatron, world_size
from .metrics import MetricsWriter, Timers, flops_per_token
from .model.layers import count_parameters
from .optim import lr_at
from .options import ConfigError
from .runtime import RunError, complaint, is_rank_0, leave, print_rank_0, start, together
from .stopping import Wish, Wishes
from .tokenizer import Tokenizer, load_tokenizer

Datasets = tuple[Any, Any, Any]
TokenizerProvider = Callable[[Config, Tokenizer], Tokenizer]


@dataclass
class Run:
    """Everything that belongs to one run."""

    config: Config
    resolved: Resolved
    device: torch.device
    engine: Engine
    datasets: Datasets
    state: TrainState
    saver: Saver
    timers: Timers
    metrics: MetricsWriter
    tokenizer: Tokenizer
    run_dir: Path
    parameters: int  # of the whole model, tied ones once

    @property
    def sample_shape(self) -> tuple[int, int]:
        """Tokens of a sample: (of the encoder or of the whole, of the decoder)."""
        plan = getattr(self.datasets[0], "plan", None)
        return (plan.encoder, plan.decoder) if plan else (self.config.data.seq_length, 0)

    @property
    def global_batch(self) -> int:
        return self.config.train_batch_size(dist.get_world_size())


def pretrain(
    train_valid_test_datasets_provider: Callable[[], Datasets],
    model_provider: Callable[[], nn.Module],
    forward_step: ForwardStep,
    *,
    count_targets: CountTargets | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    tokenizer_provider: TokenizerProvider | None = None,
    name: str = "model",
    argv: Sequence[str] | None = None,
    exit: bool = True,
) -> None:
    """Train as the command line says; a second call with the same run directory continues.

    train_valid_test_datasets_provider() -> three datasets, each None where it stays empty; a
    dataset answers `[n]` for any n >= 0 with a dict of tensors.
    model_provider() -> the model: a plain module, or a `PipelineModule` if --pipe-parallel-size is not 0.
    forward_step(data_iterator, model) -> (loss, count), used without a pipeline: with
    `count_targets` the sum of the loss over target tokens, otherwise its mean.
    count_targets(batch) -> how many target tokens a micro-batch has.
    tokenizer_provider(config, tokenizer) -> the tokenizer to use, e.g. with more special tokens.
    args_defaults: settings whose default is another for this script; flags still win.
    exit: end the process when done, as `unittest.main` does: with code 0, or after one sentence
    about a user's mistake 2 for the command line and 1 for the rest. False returns or raises.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if "-h" in argv or "--help" in argv:
        build_parser(Path(sys.argv[0]).name).parse_args(["--help"])
    code = 2
    try:
        config = parse(argv, args_defaults, world_size(), _tell)
        resolved = resolve(config, world_size(), device_module.fast_bf16(device_module.current()))
        code = 1
        providers = (train_valid_test_datasets_provider, model_provider, forward_step, count_targets)
        run = set_up(config, resolved, *providers, name, tokenizer_provider)
        train(run)
    except (RunError, ValueError, OSError) as error:
        if not exit or os.environ.get("MEGATRON_DEBUG"):
            raise
        _complain(error, everywhere=code == 2 or isinstance(error, RunError))
        leave(code)
    run.metrics.close()
    gc.collect()  # ends worker processes that read data
    dist.barrier()
    if exit:
        leave(0)
    dist.destroy_process_group()


def _tell(note: str) -> None:
    """A line from rank 0, before the ranks know each other."""
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {note}", flush=True)


def _complain(error: Exception, everywhere: bool) -> None:
    """One sentence (of settings a line each) on stderr, from rank 0 alone if all ranks know of it."""
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0 or not everywhere:
        where = "" if rank == 0 else f" (rank {rank})"
        text = str(error) if isinstance(error, ConfigError) else complaint(error)
        print(f"{Path(sys.argv[0]).name}{where}: {text}", file=sys.stderr)
    else:
        # The launcher ends all ranks when the first one leaves, and rank 0 must be the first, or nobody has spoken.
        time.sleep(10)


# ------------------------------------------------------------------------------------- set-up


def set_up(
    config: Config,
    resolved: Resolved,
    datasets_provider: Callable[[], Datasets],
    model_provider: Callable[[], nn.Module],
    forward_step: ForwardStep,
    count_targets: CountTargets | None,
    name: str,
    tokenizer_provider: TokenizerProvider | None = None,
) -> Run:
    """From settings to a run that is ready to train: ranks, data, model, engine, checkpoint."""
    device = initialize_megatron(config)
    timers = Timers(device)
    config, tokenizer, run_dir = together(lambda: _prepare(config, name, tokenizer_provider))
    start(config, tokenizer, timers)
    _say_what_runs(config, resolved, device)
    datasets = together(lambda: _datasets(datasets_provider, config, tokenizer))
    with tds.pipe.seeded_layers(config.train.seed):
        model = together(model_provider)
    parameters = count_parameters(model)
    compile_layers(model, config)
    engine = build_engine(model, config, resolved, forward_step, count_targets, timers)
    save_dir = config.checkpoint.save or str(run_dir / "checkpoints")
    state = start_or_resume(config, engine.deepspeed, save_dir, tokenizer.fingerprint, datasets[0])
    print_rank_0(f"{parameters / 1e6:.2f} million parameters")
    metrics = MetricsWriter(str(run_dir), state.iteration, is_rank_0(), config.log.tensorboard)
    saver = Saver(save_dir, engine.deepspeed, config, tokenizer.fingerprint, config.checkpoint.async_save)
    return Run(
        config, resolved, device, engine, datasets, state, saver, timers, metrics, tokenizer, run_dir, parameters
    )


def _prepare(config: Config, name: str, provider: TokenizerProvider | None) -> tuple[Config, Tokenizer, Path]:
    """Load the tokenizer, settle the vocabulary size, make the run directory and write config.json there."""
    if config.data.vocab_file is None:
        raise ValueError("no tokenizer: give --vocab-file; tools/train_tokenizer.py makes one")
    tokenizer = load_tokenizer(config.data.vocab_file, config.data.tokenizer_type)
    if provider is not None:
        tokenizer = provider(config, tokenizer)
    given = config.model.vocab_size
    if given is not None and given < tokenizer.vocab_size:
        raise ValueError(
            f"--vocab-size {given} is less than the {tokenizer.vocab_size} tokens of {config.data.vocab_file}"
        )
    config = with_values(config, {"vocab_size": given or tokenizer.vocab_size})
    run_dir = Path(config.log.run_dir or _default_run_dir(name))
    if is_rank_0():
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            temporary = run_dir / f"config.json.{os.getpid()}.tmp"
            temporary.write_text(json.dumps(config.to_dict(), indent=2), encoding="utf-8")
            os.replace(temporary, run_dir / "config.json")
        except OSError as error:
            raise ValueError(f"cannot write to the run directory {run_dir}: {error.strerror}") from None
    return config, tokenizer, run_dir


def _default_run_dir(name: str) -> str:
    """runs/<name>-<time>, the same on all ranks."""
    stamp: list[Any] = [time.strftime("%Y%m%d-%H%M%S")]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(stamp)
    return f"runs/{name}-{stamp[0]}"


def _datasets(provider: Callable[[], Datasets], config: Config, tokenizer: Tokenizer) -> Datasets:
    for path in prefixes_of(config.data.paths) if config.data.data_path or config.data.train_data_path else []:
        if Path(f"{path}.json").is_file():
            about = json.loads(Path(f"{path}.json").read_text(encoding="utf-8"))
            if about.get("fingerprint") != tokenizer.fingerprint:
                raise ValueError(
                    f"{path}.bin was made with another tokenizer (SHA-256 {str(about.get('fingerprint'))[:12]}) than "
                    f"--vocab-file {config.data.vocab_file} ({tokenizer.fingerprint[:12]})"
                )
    return provider()


def _say_what_runs(config: Config, resolved: Resolved, device: torch.device) -> None:
    grid = mpu.get_topology()
    mode = "no pipeline" if config.parallel.pipe_parallel_size == 0 else "pipeline"
    print_rank_0(
        f"{grid.world_size()} ranks on {device.type}: pipe {grid.pipe} x data {grid.data} x model {grid.model} "
        f"({mode}), {resolved.precision}, ZeRO {resolved.zero_stage}, global batch "
        f"{config.train_batch_size(grid.world_size())}"
    )
    note = device_module.precision_note(device, resolved.precision)
    if note:
        print_rank_0(note)


def data_iterator(run: Run, dataset: Any, consumed_samples: int) -> Batches | None:
    """Micro-batches for this rank; None where it gets its data from another rank or needs none."""
    mesh = mpu.get_mesh()
    reads = mesh.model.rank == 0 and mesh.pipe.rank in (0, mesh.pipe.size - 1)
    if not reads:
        return None
    t = run.config.train
    sampler = ConsecutiveSampler(t.batch_size, t.gas, mesh.data.rank, mesh.data.size, consumed_samples)
    return iter(build_loader(dataset, sampler, run.config.data.num_workers))


# ----------------------------------------------------------------------------------- the loop


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
                run.saver.save(state)
                saved = state.iteration
                window.restart()
    if run.saver.pending:
        run.saver.finish()
    if state.iteration < last:
        print_rank_0(f"asked to stop after iteration {state.iteration}; the same command continues")
        return
    if state.iteration != saved and config.checkpoint.save_at_end:
        run.saver.save(state, wait=True)
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


__all__ = ["Run", "evaluate", "pretrain", "set_up", "train"]
