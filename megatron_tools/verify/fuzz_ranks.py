"""Ranks that stay alive between the runs of the parity fuzzer, so that no run has to start an interpreter."""

import contextlib
import gc
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from megatron.config.fields import ConfigError
from megatron.config.messages import describe_error

from .verify_layout import NO_DEVICES

PRELOADED_MODULES = (
    "torch._dynamo",
    "torch.profiler._cupti_monitor",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "megatron.training.entry",
    "megatron.model.t5_pipe",
    "megatron.tasks.t5",
    "megatron.tasks.sft",
    "megatron.tasks.prefix",
    "megatron.tasks.fill_in_the_middle",
    "megatron.features.corpus_losses",
    "megatron.features.layer_log",
    "megatron.features.expert_log",
    "megatron.tokenizer.sentencepiece",
    "sentencepiece",
    "megatron_tools.verify.fuzz_ranks",
)
MAX_RUNS = 8  # ranks are replaced after this many runs, because each run leaves threads of gloo and of watchdogs


class Outcome(NamedTuple):
    """Result of a run on one rank: kind is `ok`, `refused` (a ConfigError), `crash` or `hang`."""

    kind: str
    message: str = ""


OK = Outcome("ok")


def preload_modules() -> None:
    """Let the process from which all ranks are forked import the modules of a run first."""
    # DeepSpeed looks for devices when it is imported, so the process that imports it must not see any.
    os.environ.update(NO_DEVICES)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    # Ranks end without removing the locks of tqdm; Python's tracker removes them, and would warn about that.
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker:UserWarning"
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOADED_MODULES))


@dataclass
class Ranks:
    """A fixed number of gloo ranks on this machine, which do one training run after another.

    folder: working directory of the ranks. prepare: function that each rank calls first.
    """

    world: int
    folder: Path
    prepare: Callable[[], object] | None = None
    _runs: int = 0
    _processes: list[Any] = field(default_factory=list)
    _pipes: list[Connection] = field(default_factory=list)

    def start(self, argv: Sequence[str], rendezvous_file: Path) -> None:
        """Start a run. rendezvous_file: path of a file that does not exist yet, at which the ranks of the run meet."""
        # Also true before the first run.
        if self._runs % MAX_RUNS == 0:
            self.close()
            self._open()
        self._runs += 1
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # `finish` reports a rank that has died
                pipe.send((argv, rendezvous_file))

    def finish(self, deadline: float) -> Outcome:
        """Wait for the end of the run, and return the worst outcome of all ranks. Failed ranks are replaced."""
        outcomes: list[Outcome] = []
        waiting = list(self._pipes)
        while waiting and time.monotonic() < deadline:
            for pipe in wait(waiting, timeout=max(0.0, deadline - time.monotonic())):
                waiting.remove(pipe)  # type: ignore[arg-type]
                outcomes.append(_receive_outcome(pipe))
                if outcomes[-1].kind != "ok":
                    deadline = min(deadline, time.monotonic() + 2)  # the other ranks get 2 s to report
        if waiting:
            outcomes.append(Outcome("hang", f"{len(waiting)} of {self.world} ranks did not finish in time"))
        # The outcome that explains the most comes first: if one rank fails, others may wait for it in vain, so an error
        # explains a hang.
        worst = min(outcomes, key=lambda outcome: ("refused", "crash", "hang", "ok").index(outcome.kind))
        if worst.kind != "ok":
            self.close()
        return worst

    def close(self) -> None:
        """End all ranks."""
        for process in self._processes:
            process.kill()
            process.join()
        self._runs = 0
        self._processes = []
        self._pipes = []

    def _open(self) -> None:
        context = multiprocessing.get_context("forkserver")
        for rank in range(self.world):
            parent_end, child_end = context.Pipe()
            args = (rank, self.world, str(self.folder), child_end, self.prepare)
            process = context.Process(target=_serve_runs, args=args, daemon=True)
            process.start()
            child_end.close()
            self._pipes.append(parent_end)
            self._processes.append(process)


def _receive_outcome(pipe: Any) -> Outcome:
    try:
        return Outcome(*pipe.recv())
    except EOFError:
        return Outcome("crash", "a rank died without a Python error")


def _serve_runs(rank: int, world: int, folder: str, job_pipe: Any, prepare: Callable[[], object] | None) -> None:
    """Do the runs that arrive at `job_pipe` until one fails."""
    os.chdir(folder)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    # Hide what the run prints: 1 and 2 are standard output and standard error.
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    from megatron.features import target_bytes

    target_bytes.MAX_SAMPLES = 20  # counting the bytes of 5000 samples takes longer than the run
    if prepare:
        prepare()
    gc.freeze()  # the garbage collections of each run need not scan the imported modules
    outcome = OK
    while outcome.kind == "ok":
        try:
            argv, rendezvous_file = job_pipe.recv()
        except EOFError:  # the parent process has ended
            break
        outcome = _train(rank, world, argv, rendezvous_file)
        job_pipe.send(tuple(outcome))
    os._exit(0)  # skips Python's shutdown, in which gloo's threads may fail


def _train(rank: int, world: int, argv: list[str], rendezvous_file: Path) -> Outcome:
    import torch
    import torch.distributed as dist

    import tds
    from megatron.tasks import TASKS
    from megatron.training import run

    torch.set_num_threads(1)
    family = argv[argv.index("--family") + 1]
    try:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous_file}", rank=rank, world_size=world)
        tds.init_distributed("gloo", auto_mpi_discovery=False)
        run(TASKS[family](), argv, exit=False)
    except ConfigError as error:
        return Outcome("refused", describe_error(error))
    # Also SystemExit, with which a run may end.
    except BaseException:
        return Outcome("crash", traceback.format_exc())
    return OK
