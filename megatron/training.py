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

from . import device as device_module
from . import mpu
from .agreement import same_everywhere
from .arguments import build_parser, parse, with_values
from .checkpointing import Saver, start_or_resume
from .compiling import compile_layers
from .config import Config
from .data.corpora import prefixes_of
from .ds_config import Resolved, resolve
from .engine import CountTargets, ForwardStep, build_engine
from .initialize import initialize_megatron, world_size
from .loop import Datasets, Run, evaluate, train
from .metrics import MetricsWriter, Timers
from .model.layers import count_parameters
from .options import ConfigError
from .runtime import RunError, complaint, is_rank_0, leave, print_rank_0, start, together
from .tokenizer import Tokenizer, load_tokenizer

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
    same_everywhere({"--precision": resolved.precision, "the SHA-256 of --vocab-file": tokenizer.fingerprint})
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


__all__ = ["Run", "evaluate", "pretrain", "set_up", "train"]
