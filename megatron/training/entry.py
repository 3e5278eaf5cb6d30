"""The function `run(task)`, which executes a complete run: from the command line to the trained checkpoint."""

import gc
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from tds.diagnose import Watchdog, out_of_memory
from tds.parent_death import ImpossibleRanks, refuse_impossible_ranks

from ..config import Config
from ..config.check import print_note
from ..config.command_line import help_if_asked, parse
from ..config.ds_config import resolve
from ..config.fields import ConfigError, describe
from ..data.corpora import prefixes_of
from ..data.indexed_dataset import IndexedDataset
from ..data.workers import describe_end
from ..ranks import device as device_module
from ..ranks.errors import RunError, complaint, exit_now
from ..ranks.initialize import world_size
from ..ranks.signals import INTERRUPTED, restored_signals
from ..storage import is_url
from ..streams import guarded
from .feature import Feature
from .features import substitute
from .inputs import MissingInputs, refuse_missing
from .loop import train
from .setup import set_up
from .task import Task, check_task

CONTINUES = "training continues, and metrics.jsonl has the numbers"


def run(
    task: Task,
    argv: Sequence[str] | None = None,
    exit: bool = True,
    config: Config | None = None,
    features: Sequence[Feature] = (),
) -> None:
    """Train `task` with the settings of the command line; a second call with the same run directory resumes the run.

    argv: command-line arguments; None for sys.argv. config: settings that are already parsed; `argv` is then ignored.
    exit: True ends the process after the run, like `unittest.main`. The exit code is 0 for success, 2 for a mistake on
    the command line and 1 for any other user error. A user error is printed in one sentence. False returns after a
    successful run and raises errors.
    features: optional parts of your own, which the run calls besides those that the settings ask for.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    help_if_asked(getattr(task, "defaults", {}).get("family"))
    code = 2
    with guarded(CONTINUES, "stdout", "stderr"), restored_signals():
        try:
            refuse_impossible_ranks()
            check_task(task, "datasets", "model", "batch")
            config = config or parse(argv, task.defaults, world_size(), print_note)
            other = substitute(config)
            if other:
                other.instead(task, config)
                return
            config = config.with_batches(world_size())
            resolved = resolve(config, world_size(), device_module.fast_bf16(device_module.current()))
            code = 1
            refuse_missing(task, config)
            with set_up(task, config, resolved, features) as ready:
                train(ready)
            del ready
        except (RunError, ValueError, OSError, KeyboardInterrupt, MemoryError, RuntimeError) as error:
            expected = isinstance(error, RunError) or out_of_memory(error) or describe_end(error)
            bug = isinstance(error, RuntimeError) and not expected
            if bug or not exit or os.environ.get("MEGATRON_DEBUG"):
                raise
            here = isinstance(error, ImpossibleRanks)
            _complain(
                error,
                config,
                everywhere=(code == 2 and not here) or isinstance(error, (RunError, MissingInputs, KeyboardInterrupt)),
            )
            exit_now(INTERRUPTED if isinstance(error, KeyboardInterrupt) else code)
        gc.collect()  # deletes the data loaders, which ends their worker processes
        dist.barrier()
        if exit:
            exit_now(0)
    dist.destroy_process_group()


def _damage_of(config: Config | None) -> str | None:
    """Return what is wrong with the files of a corpus, None if nothing is: reading a file that became shorter kills."""
    if config is None or not config.data.names_corpora:
        return None
    try:
        for prefix in prefixes_of(config.data.paths):
            if not is_url(prefix):
                IndexedDataset(prefix)
    except (ValueError, OSError) as error:
        return describe(error)
    return None


def _complain(error: BaseException, config: Config | None, everywhere: bool) -> None:
    """Print the error on stderr, in one sentence or with one line for each invalid setting.

    everywhere: True if all ranks probably have this error, so that only rank 0 needs to print it.
    """
    text = os.environ.get("RANK", "0")
    rank = int(text) if text.isdecimal() else 0
    is_interrupt = isinstance(error, KeyboardInterrupt)
    if rank != 0 and everywhere:
        if is_interrupt:
            return
        # The launcher ends all ranks when the first rank exits. So this rank gives rank 0 time to print the error and
        # exit. If this rank still runs after the wait, rank 0 has no error, so this rank prints the error.
        time.sleep(10)
    where = "" if rank == 0 else f" (rank {rank})"
    print(f"{Path(sys.argv[0]).name}{where}: {_words(error, config)}", file=sys.stderr)


def _words(error: BaseException, config: Config | None) -> str:
    """Return what went wrong and what to do, for the errors that `run` expects."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted (Ctrl-C)"
    if lack := out_of_memory(error):
        return f"{lack}; {Watchdog.advice}"
    if ended := describe_end(error):
        damage = _damage_of(config)
        return f"{damage}; {ended}" if damage else ended
    return str(error) if isinstance(error, ConfigError) else complaint(error)
