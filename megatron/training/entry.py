"""`pretrain()` is the whole of a run, from a command line to a trained checkpoint."""

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tds
from tds.diagnose import Watchdog, out_of_memory

from .. import mpu
from ..checkpointing import PatientSaver, Saver, start_or_resume
from ..checkpointing.beside import look_of
from ..checkpointing.files import clear
from ..config import Config
from ..config.command_line import build_parser, parse, with_values
from ..config.ds_config import Resolved, resolve
from ..config.fields import ConfigError
from ..data.corpora import prefixes_of
from ..model.layers import count_parameters
from ..ranks import device as device_module
from ..ranks.agreement import same_everywhere
from ..ranks.errors import RunError, complaint, exit_now, on_all_ranks
from ..ranks.initialize import initialize_megatron, steps_begin, world_size
from ..ranks.rank_0 import is_rank_0, print_rank_0
from ..ranks.signals import INTERRUPTED, signals_as_before
from ..tokenizer import Tokenizer, load_tokenizer
from . import run_folder
from .compiling import compile_layers
from .engine import CountTargets, ForwardStep, build_engine
from .global_vars import start
from .loop import Datasets, Run, evaluate, train
from .metrics import MetricsWriter, Timers
from .run_lock import RunLock
from .watch import memory_advice, watched

TokenizerProvider = Callable[[Config, Tokenizer], Tokenizer]


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
    providers = (train_valid_test_datasets_provider, model_provider, forward_step, count_targets)
    code = 2
    with signals_as_before():
        try:
            config = parse(argv, args_defaults, world_size(), _tell)
            resolved = resolve(config, world_size(), device_module.fast_bf16(device_module.current()))
            code = 1
            with set_up(config, resolved, *providers, name, tokenizer_provider) as run:
                train(run)
            del run
        except (RunError, ValueError, OSError, KeyboardInterrupt, MemoryError, RuntimeError) as error:
            bug = isinstance(error, RuntimeError) and not isinstance(error, RunError) and not out_of_memory(error)
            if bug or not exit or os.environ.get("MEGATRON_DEBUG"):
                raise
            _complain(error, everywhere=code == 2 or isinstance(error, (RunError, KeyboardInterrupt)))
            exit_now(INTERRUPTED if isinstance(error, KeyboardInterrupt) else code)
        gc.collect()  # ends worker processes that read data
        dist.barrier()
        if exit:
            exit_now(0)
    dist.destroy_process_group()


def _tell(note: str) -> None:
    """A line from rank 0, before the ranks know each other."""
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {note}", flush=True)


def _complain(error: BaseException, everywhere: bool) -> None:
    """One sentence (of settings a line each) on stderr, from rank 0 alone if all ranks know of it."""
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0 or not everywhere:
        where = "" if rank == 0 else f" (rank {rank})"
        text = str(error) if isinstance(error, ConfigError) else complaint(error)
        if isinstance(error, KeyboardInterrupt):
            text = "interrupted (Ctrl-C)"
        elif lack := out_of_memory(error):
            text = f"{lack}; {Watchdog.advice}"
        print(f"{Path(sys.argv[0]).name}{where}: {text}", file=sys.stderr)
    elif not isinstance(error, KeyboardInterrupt):
        # The launcher ends all ranks when the first one leaves, and rank 0 must be the first, or nobody has spoken.
        time.sleep(10)


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
    config, tokenizer, run_dir = on_all_ranks(lambda: _prepare(config, name, tokenizer_provider))
    same_everywhere({"--precision": resolved.precision, "the SHA-256 of --vocab-file": tokenizer.fingerprint})
    start(config, tokenizer, timers)
    locks = on_all_ranks(lambda: run_folder.lock(config, run_dir) if is_rank_0() else [])
    try:
        _say_what_runs(config, resolved, device, locks)
        datasets = on_all_ranks(lambda: _datasets(datasets_provider, config, tokenizer))
        same_everywhere(on_all_ranks(lambda: _looks(config)))
        with tds.pipe.seeded_layers(config.train.seed):
            model = on_all_ranks(model_provider)
        parameters = count_parameters(model)
        compile_layers(model, config)
        engine = build_engine(model, config, resolved, forward_step, count_targets, timers)
        engine = watched(engine, 60 * config.parallel.distributed_timeout_minutes)
        Watchdog.advice = memory_advice(parameters, config, resolved.precision)
        save_dir = str(run_folder.save_dir_of(config, run_dir))
        state, config = start_or_resume(config, engine.deepspeed, save_dir, tokenizer.fingerprint, datasets[0])
        metrics = on_all_ranks(lambda: _accepted(config, run_dir, save_dir, state.iteration, locks))
    except BaseException:
        run_folder.release(locks)
        raise
    start(config, tokenizer, timers)
    steps_begin(config)
    print_rank_0(f"{parameters / 1e6:.2f} million parameters")
    saver = Saver(save_dir, engine.deepspeed, config, tokenizer.fingerprint, config.checkpoint.async_save)
    patient = PatientSaver(saver, config.checkpoint.failed_saves)
    return Run(
        config,
        resolved,
        device,
        engine,
        datasets,
        state,
        patient,
        timers,
        metrics,
        tokenizer,
        run_dir,
        parameters,
        locks,
    )


def _accepted(config: Config, run_dir: Path, save_dir: str, iteration: int, locks: Sequence[RunLock]) -> MetricsWriter:
    """Nothing stands against the run any more: from here on it changes its directory. Raises ValueError."""
    if is_rank_0():
        run_folder.refuse_to_forget(config, run_dir, iteration)
        clear(Path(save_dir))
        for note in run_folder.accept(config, run_dir, iteration):
            print_rank_0(f"note: {note}")
        for each in locks:
            each.keep()
    return MetricsWriter(str(run_dir), iteration, is_rank_0(), config.log.tensorboard)


def _prepare(config: Config, name: str, provider: TokenizerProvider | None) -> tuple[Config, Tokenizer, Path]:
    """Load the tokenizer, settle the vocabulary size and the run directory."""
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
    run_dir = config.log.run_dir or _default_run_dir(name)
    return with_values(config, {"run_dir": run_dir}), tokenizer, Path(run_dir)


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
                    f"{path}.bin was made with another tokenizer ({about.get('tokenizer')}, SHA-256 {str(about.get('fingerprint'))[:12]}) "
                    f"than --vocab-file {config.data.vocab_file} ({tokenizer.name}, {tokenizer.fingerprint[:12]})"
                )
    return provider()


def _looks(config: Config) -> dict[str, str]:
    """What tells the corpora of one node from those of another, where each has its own disk."""
    paths = prefixes_of(config.data.paths) if config.data.data_path or config.data.train_data_path else []
    return {f"the look of {path}": look_of(path) for path in paths}


def _say_what_runs(config: Config, resolved: Resolved, device: torch.device, locks: Sequence[RunLock]) -> None:
    grid = mpu.get_topology()
    mode = "no pipeline" if config.parallel.pipe_parallel_size == 0 else "pipeline"
    print_rank_0(
        f"{grid.world_size()} ranks on {device.type}: pipe {grid.pipe} x data {grid.data} x model {grid.model} "
        f"({mode}), {resolved.precision}, ZeRO {resolved.zero_stage}, global batch "
        f"{config.train_batch_size(grid.world_size())}"
    )
    for note in [f"note: {note}" for each in locks for note in each.notes]:
        print_rank_0(note)
    slow = device_module.precision_note(device, resolved.precision)
    if slow:
        print_rank_0(slow)


__all__ = ["Run", "evaluate", "pretrain", "set_up", "train"]
