"""The function `run(task)`, which executes a complete run: from the command line to the trained checkpoint."""

import gc
import os
import sys
from collections.abc import Sequence

import torch.distributed as dist

from tds.diagnose import out_of_memory
from tds.parent_death import ImpossibleRanks, refuse_impossible_ranks

from ..config import Config
from ..config.check import help_if_asked, print_note
from ..config.command_line import parse
from ..config.ds_config import resolve
from ..data.workers import describe_end
from ..ranks import device as device_module
from ..ranks.errors import RunError, exit_now
from ..ranks.initialize import world_size
from ..ranks.signals import INTERRUPTED, restored_signals
from ..streams import guarded
from .feature import Feature
from .features import substitute
from .inputs import MissingInputs, refuse_missing
from .loop import train
from .setup import set_up
from .task import Task
from .task_checks import check_task

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
            from .complaints import complain

            complain(
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
