"""The end of a run that cannot continue, and the sentence that says why."""

import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from tds.diagnose import Watchdog, out_of_memory
from tds.parent_death import ImpossibleRanks

from ..config import Config
from ..config.fields import ConfigError
from ..config.messages import describe_error
from ..data.indexed_dataset import IndexedDataset
from ..data.workers import describe_worker_end
from ..ranks.errors import RunError, exit_now, one_line_error
from ..ranks.signals import INTERRUPTED
from .inputs import MissingInputs, local_corpora


def is_bug(error: BaseException) -> bool:
    """Return whether an error that has ended a run is a bug, whose traceback is needed."""
    is_expected = isinstance(error, RunError) or out_of_memory(error) or describe_worker_end(error)
    return isinstance(error, RuntimeError) and not is_expected


def exit_with_error(error: BaseException, config: Config | None, exit_code: int) -> NoReturn:
    """Print the error with which a run ends, and end the process. exit_code: 2 for a mistake on the command line."""
    # All ranks get the same flags, so they find the same mistake. But RANK may be impossible on one rank only.
    has_wrong_flags = exit_code == 2 and not isinstance(error, ImpossibleRanks)
    on_all_ranks = has_wrong_flags or isinstance(error, (RunError, MissingInputs, KeyboardInterrupt))
    is_interrupt = isinstance(error, KeyboardInterrupt)
    exit_code = INTERRUPTED if is_interrupt else exit_code
    text = os.environ.get("RANK", "0")
    rank = int(text) if text.isdecimal() else 0
    if rank != 0 and on_all_ranks:  # only rank 0 needs to print the error
        if is_interrupt:
            exit_now(exit_code)
        # The launcher ends all ranks when the first rank exits. So this rank gives rank 0 time to print the error and
        # exit. If this rank still runs after the wait, rank 0 has no error, so this rank prints the error.
        time.sleep(10)
    where = "" if rank == 0 else f" (rank {rank})"
    print(f"{Path(sys.argv[0]).name}{where}: {_error_text(error, config)}", file=sys.stderr)
    exit_now(exit_code)


def end_row(error: BaseException, run: Any) -> dict[str, Any]:
    """Return the last row of metrics.jsonl of `run`, a Run that `error` has ended."""
    return {"split": "end", "iteration": run.state.iteration, "reason": _error_text(error, run.config)}


def _error_text(error: BaseException, config: Config | None) -> str:
    """Return what went wrong and what to do, for the errors that `run` expects."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted (Ctrl-C)"
    if memory_problem := out_of_memory(error):
        return f"{memory_problem}; {Watchdog.advice}"
    if worker_end := describe_worker_end(error):
        damage = _corpus_damage(config)
        return f"{damage}; {worker_end}" if damage else worker_end
    return str(error) if isinstance(error, ConfigError) else one_line_error(error)


def _corpus_damage(config: Config | None) -> str | None:
    """Return what is wrong with the files of a corpus, None if nothing is.

    Reading a memory-mapped file that became shorter kills a data worker without an error of its own.
    """
    if config is None:
        return None
    try:
        for prefix in local_corpora(config):
            IndexedDataset(prefix)  # raises for damaged files
    except (ValueError, OSError) as error:
        return describe_error(error)
    return None
