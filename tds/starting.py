"""Error reports between `init_distributed` and the first watched engine; they end all ranks, so that none waits."""

import torch.distributed as dist

from .diagnose import Watchdog


class _Start:
    """Describer for the watchdog until an engine has its own.

    It is kept alive here, because a watchdog holds it by weak reference.
    """

    watchdog: Watchdog | None = None

    def describe(self, what: object) -> str:
        return str(what)


_start = _Start()


def watch_the_start() -> None:
    """Make an error that ends this process end all ranks, with a report, until an engine watches them."""
    if not dist.is_initialized() or dist.get_backend() == "fake":  # a simulated world has no other processes
        return
    if dist.get_world_size() > 1 and Watchdog.latest() is None:
        _start.watchdog = Watchdog(float("inf"), _start.describe, "run", idle="before its first watched step")
        _start.watchdog.reports_all_errors = True
