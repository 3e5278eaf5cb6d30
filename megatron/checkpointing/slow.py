"""A note about writing that takes too long, as on a hanging disk."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from megatron.ranks.rank_0 import own_rank

SLOW_SECONDS = 300.0  # writing time after which a note is printed; enough for a large share on a slow disk


@contextlib.contextmanager
def warn_if_slow(path: Path) -> Iterator[None]:
    """Print a note if the `with` block, which writes `path`, takes more than `SLOW_SECONDS`, as on a hanging disk."""
    rank = own_rank()
    message = (
        f"note: rank {rank} has been writing {path} for {SLOW_SECONDS:g} s; if the disk hangs, this checkpoint never "
        "becomes valid, and the next save waits for it"
    )
    timer = threading.Timer(SLOW_SECONDS, lambda: print(message, flush=True))
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # failing to start a thread for the note must not fail the save
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
