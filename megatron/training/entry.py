"""The function `run(task)`, which executes a complete run: from the command line to the trained checkpoint."""

import gc
import os
import sys
from collections.abc import Sequence

import torch.distributed as dist

from tds.parent_death import refuse_impossible_ranks

from ..config import Config
from ..config.check import print_help_if_asked, print_note
from ..config.command_line import parse
from ..config.ds_config import resolve
from ..ranks import device as device_module
from ..ranks.errors import RunError, exit_now
from ..ranks.initialize import world_size
from ..ranks.signals import restored_signals
from ..streams import guard_streams, raise_open_files
from .feature import Feature
from .features import find_substitute
from .inputs import require_inputs
from .loop import train
from .setup import set_up
from .task import Task
from .task_checks import check_task


def run(
    task: Task,
    argv: Sequence[str] | None = None,
    exit: bool = True,
    config: Config | None = None,
    features: Sequence[Feature] = (),
) -> None:
    """Train `task` with the settings of the command line; a second call with the same run directory resumes the run.

    argv: command-line arguments; None for sys.argv. config: settings that are already parsed; `argv` is then ignored.
    exit: True ends the process after the run, with exit code 0 for success, 2 for a mistake on the command line and 1
    for any other user error, which is printed in one sentence. False returns after a successful run and raises errors.
    features: optional parts of your own, which the run calls besides those that the settings ask for.
    """
    raise_open_files()
    print_help_if_asked(getattr(task, "defaults", {}).get("family"))  # `check_task` has not seen the task yet
    exit_code = 2  # until the settings have been resolved, an error is a mistake on the command line
    with guard_streams("training continues, and metrics.jsonl has the numbers", "stdout", "stderr"), restored_signals():
        try:
            refuse_impossible_ranks()
            check_task(task, "datasets", "model", "batch")
            config = config or parse(sys.argv[1:] if argv is None else argv, task.defaults, world_size(), print_note)
            substitute = find_substitute(config)  # feature that replaces the training, such as --dry-run
            if substitute:
                substitute.instead(task, config)
                return  # there is no process group to wait for or to destroy
            config = config.with_derived_iters(world_size())
            resolved = resolve(config, world_size(), device_module.has_fast_bf16(device_module.current_device()))
            exit_code = 1  # from here on, an error is no mistake on the command line
            require_inputs(task, config)
            with set_up(task, config, resolved, features) as ready_run:
                train(ready_run)
            del ready_run  # so that gc.collect() below deletes its data loaders
        # RuntimeError is a bug unless torch raises it for memory or a data worker, see `is_bug`.
        except (RunError, ValueError, OSError, KeyboardInterrupt, MemoryError, RuntimeError) as error:
            from .complaints import exit_with_error, is_bug

            wants_traceback = not exit or os.environ.get("MEGATRON_DEBUG")
            if wants_traceback or is_bug(error):
                raise
            exit_with_error(error, config, exit_code)
        gc.collect()  # deletes the data loaders, which ends their worker processes
        dist.barrier()  # no rank ends while others still need it
        if exit:
            exit_now(0)
    dist.destroy_process_group()
