"""Run functions on gloo ranks, and run commands. If ranks hang, the test fails and shows the stack of each rank."""

import contextlib
import faulthandler
import functools
import importlib
import io
import json
import multiprocessing
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from .forked_ranks import fork_ranks, run_script

FULL = pytest.mark.full
ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 120.0

# The tests run on the CPU, also on a machine with accelerators: a process that has seen one cannot be forked.
os.environ.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="", ASCEND_RT_VISIBLE_DEVICES="")

# Ranks are forked from one process, the fork server, which has imported the heavy libraries. These include 800
# modules (torch._dynamo with sympy) that each rank would else import for its first optimizer and engine.
_context = multiprocessing.get_context("forkserver")
_preloaded = ["torch", "tds", "torch._dynamo", "deepspeed.module_inject.auto_ep_layer", "torch.profiler._cupti_monitor"]
# DeepSpeed imports its Muon in each run with ZeRO or bf16, and with it torch._inductor.
_preloaded += ["torch.utils.tensorboard", "deepspeed.runtime.zero.muon.muon_optimizer"]
_preloaded += [
    "megatron.tasks.functions",
    "megatron.training.entry",
    "megatron.training.loop",
    "megatron.tasks",
    "megatron.model.pipe",
    "megatron.tokenizer.sentencepiece",
    "megatron.tokenizer.cpm",
    "sentencepiece",
    "torch.distributed.run",
    "tests.support",
]
_context.set_forkserver_preload([*_preloaded, "tests.frozen"])


def preload(*modules: str) -> None:
    """Let the fork server import further modules; call this before the first rank or command starts."""
    _preloaded.extend(modules)
    _context.set_forkserver_preload([*_preloaded, "tests.frozen"])


def covering(cases: Sequence[Any], chosen: Callable[[Any], bool], several: bool = False) -> list[Any]:
    """Return `cases` as pytest parameters; cases for which `chosen` returns False run only with --full.

    several: whether each case is a tuple of several parameters.
    """
    return [case if chosen(case) else pytest.param(*(case if several else [case]), marks=FULL) for case in cases]


class RankFailure(AssertionError):
    """Raised if the function on a rank raised, or the rank died or did not finish in time."""


def _rank_main(rank: int, world: int, folder: str, body: Callable[..., Any], args: tuple[Any, ...]) -> None:
    # Ranks are daemon processes, so that they end with the test process. Python lets no daemon start data-loader
    # workers, so this rank hides that it is a daemon.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    where = Path(folder)
    words = os.open(where / f"stderr{rank}", os.O_CREAT | os.O_WRONLY)
    if (where / "capture").exists():
        os.dup2(words, 2)
    stacks = open(where / f"stack{rank}", "w")  # noqa: SIM115  # stays open for the signal handler
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
        OMP_NUM_THREADS="1",
        TORCH_EXTENSIONS_DIR=str(where / "extensions"),
    )
    try:
        import torch
        import torch.distributed as dist

        import tds
        from tds.recorder import record_collectives

        torch.set_num_threads(1)
        record_collectives()
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
        tds.init_distributed("gloo", auto_mpi_discovery=False)
        result = body(*args)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        (where / f"result{rank}").write_bytes(pickle.dumps(result))
    except BaseException:
        (where / f"error{rank}").write_text(traceback.format_exc())
        _end(1)
    _end(0)  # skips Python's shutdown, during which gloo's threads would print errors


def _end(code: int) -> None:
    for worker in multiprocessing.active_children():  # Otherwise, the data-loader workers would outlive the rank.
        worker.kill()
    os._exit(code)


def on_ranks(world: int, body: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
    """Run `body(*args)` on `world` gloo ranks; return the list of its results, by rank.

    Raises RankFailure with the traceback of every rank that raised, or after `timeout` seconds
    with the stack of every rank that still runs.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            _context.Process(target=_rank_main, args=(rank, world, folder, body, args), daemon=True)
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + timeout
        try:
            while any(p.is_alive() for p in ranks) and time.monotonic() < deadline:
                time.sleep(0.02)
                if any(p.exitcode not in (None, 0) for p in ranks):
                    deadline = min(deadline, time.monotonic() + 2)  # after a failure, other ranks get 2 s more
            stuck = [rank for rank, p in enumerate(ranks) if p.is_alive()]
            for rank in stuck:
                os.kill(ranks[rank].pid or 0, signal.SIGUSR1)
            for _ in range(50):  # wait up to 5 s for the files with stacks
                if all((Path(folder) / f"stack{rank}").stat().st_size for rank in stuck):
                    break
                time.sleep(0.1)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()
        where = Path(folder)
        problems = [f"--- rank {r}\n{f.read_text()}" for r in range(world) if (f := where / f"error{r}").exists()]
        if not problems:
            problems = [f"--- rank {r} did not finish\n{(where / f'stack{r}').read_text()}" for r in stuck]
            problems += [
                f"--- rank {r} ended with code {p.exitcode}"
                for r, p in enumerate(ranks)
                if r not in stuck and p.exitcode
            ]
        if problems:
            raise RankFailure("\n".join(problems))
        return [pickle.loads((where / f"result{rank}").read_bytes()) for rank in range(world)]


class End(NamedTuple):
    """How a rank ended: exit code, output on stderr, and seconds from its start."""

    code: int | None  # -n if signal n killed the rank; None if the rank did not end
    stderr: str
    seconds: float


def ends_of_ranks(world: int, body: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[End]:
    """Run `body(*args)`, which should fail, on `world` gloo ranks; return how each rank ended."""
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        (where / "capture").touch()
        ranks = [
            _context.Process(target=_rank_main, args=(rank, world, folder, body, args), daemon=True)
            for rank in range(world)
        ]
        begin = time.monotonic()
        for process in ranks:
            process.start()
        took = [timeout] * world
        alive = set(range(world))
        while alive and time.monotonic() - begin < timeout:
            time.sleep(0.02)
            for rank in [rank for rank in alive if not ranks[rank].is_alive()]:
                took[rank] = time.monotonic() - begin
                alive.remove(rank)
        codes = [p.exitcode for p in ranks]
        for process in ranks:
            process.kill()
            process.join()
        errors = [(where / f"error{r}").read_text() if (where / f"error{r}").exists() else "" for r in range(world)]
        words = [(where / f"stderr{r}").read_text() for r in range(world)]
        return [End(c, w + e, t) for c, w, e, t in zip(codes, words, errors, took, strict=True)]


def _pretrain(name: str, argv: list[str]) -> None:
    from megatron.tasks import TASKS
    from megatron.training import pretrain, run

    with contextlib.redirect_stdout(io.StringIO()):
        if name in TASKS:
            return run(TASKS[name](), argv, exit=False)
        entry = importlib.import_module(name)
        return pretrain(
            entry.train_valid_test_datasets_provider,
            entry.model_provider,
            entry.forward_step,
            count_targets=getattr(entry, "count_targets", None),
            tokenizer_provider=getattr(entry, "tokenizer_provider", None),
            args_defaults=getattr(entry, "DEFAULTS", None),
            name=name.split(".")[-1],
            argv=argv,
            exit=False,
        )


def train(name: str, world: int, run_dir: Path, *argv: str) -> list[dict[str, Any]]:
    """Train on `world` ranks; return the rows of metrics.jsonl.

    name: gpt2, llama or t5, or a module with the functions that `pretrain()` takes.
    """
    on_ranks(world, _pretrain, name, ["--run-dir", str(run_dir), *argv])
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


train_gpt2 = functools.partial(train, "gpt2")
train_t5 = functools.partial(train, "t5")


def losses(rows: Sequence[dict[str, Any]], split: str = "train") -> list[float]:
    return [row["lm_loss"] for row in rows if row["split"] == split and "lm_loss" in row]


def free_port() -> int:
    """Return a free TCP port that no other test gets meanwhile: systems hand out only ports above 32767 on request."""
    while True:
        port = random.SystemRandom().randrange(20000, 32768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def command(*argv: str, env: dict[str, str] | None = None, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
    """Run a command in the checkout, as a user would; `python` is the Python of the tests.

    To save seconds, a Python script runs in a fork of a process that has imported torch and this project's modules.
    It gets a new interpreter if `env` sets PYTHONPATH or CXX, which matter at start-up.
    """
    whole = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    read_at_start = {"PYTHONPATH", "CXX"} & {name for name, value in (env or {}).items() if value != str(ROOT)}
    if argv[0] == "python" and argv[1].endswith(".py") and not read_at_start:
        return _forked(argv, whole, timeout)
    full = [sys.executable if argv[0] == "python" else argv[0], *argv[1:]]
    return subprocess.run(full, cwd=ROOT, env=whole, capture_output=True, text=True, timeout=timeout, check=False)


def _forked(argv: Sequence[str], env: dict[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        process = _context.Process(target=_script_main, args=(list(argv[1:]), env, folder), daemon=True)
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(list(argv), timeout)
        out, err = (Path(folder, name).read_text() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(list(argv), process.exitcode or 0, out, err)


def ends_of_script(world: int, folder: Path, *argv: str, timeout: float = TIMEOUT) -> list[tuple[int | None, str]]:
    """Run the script argv[0] in `folder` on ranks that no launcher started; return (exit code, stderr) of each.

    The ranks are forks of a process that has imported torch, so that they start in a fraction of a second.
    """
    rendezvous = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = []
    for rank in range(world):
        output = folder / f"rank{rank}"
        output.mkdir()
        env = {**os.environ, **rendezvous, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = _context.Process(target=_script_main, args=(list(argv), env, str(output), str(folder)), daemon=True)
        process.start()
        ranks.append(process)
    deadline = time.monotonic() + timeout
    ends = []
    for rank, process in enumerate(ranks):
        process.join(max(deadline - time.monotonic(), 0))
        code = process.exitcode
        process.kill()
        process.join()
        ends.append((code, (folder / f"rank{rank}" / "stderr").read_text()))
    return ends


def _script_main(argv: list[str], env: dict[str, str], folder: str, directory: str = str(ROOT)) -> None:
    """Act as `python argv...` in `directory`, with stdout and stderr in files of `folder`."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    for number, name in ((0, os.devnull), (1, f"{folder}/stdout"), (2, f"{folder}/stderr")):
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in ((0, "r"), (1, "w"), (2, "w")))
    os.environ.clear()
    os.environ.update(env)
    os.chdir(directory)
    if Path(argv[0]).name == "launch.py":
        fork_ranks()
    _end(run_script(argv))
