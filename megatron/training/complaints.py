"""The sentence with which a run ends that cannot continue."""

import os
import sys
import time
from pathlib import Path
from typing import Any

from tds.diagnose import Watchdog, out_of_memory

from ..config import Config
from ..config.fields import ConfigError, describe
from ..data.corpora import prefixes_of
from ..data.indexed_dataset import IndexedDataset
from ..data.workers import describe_end
from ..ranks.errors import complaint
from ..storage import is_url


def complain(error: BaseException, config: Config | None, everywhere: bool) -> None:
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


def end_of(error: BaseException, run: Any) -> dict[str, Any]:
    """Return the last row of metrics.jsonl of `run`, a Run that `error` has ended."""
    return {"split": "end", "iteration": run.state.iteration, "reason": _words(error, run.config)}


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
