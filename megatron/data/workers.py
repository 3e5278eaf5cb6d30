"""Processes that read samples ahead: they end with the one they read for, and with nothing else."""

import atexit
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait

from data_utils.tracker import start_tracker


@contextmanager
def sheltered() -> Iterator[None]:
    """While inside, processes are started that no signal to a whole group reaches: it is for the one that saves and then ends them."""
    signals = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        start_tracker()  # the first semaphore starts it, and that opens this process to SIGTERM again
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_all() -> None:
    """End the workers of this process; Python would ask them by SIGTERM, and wait for an answer."""
    for worker in multiprocessing.active_children():
        worker.kill()


def end_all_at_exit() -> None:
    """No process that reads data outlives this one."""
    atexit.unregister(end_all)
    atexit.register(end_all)


def begin(_: int) -> None:
    """What a loader's worker does first: see that it ends at once when the process that started it does.

    torch looks for that process itself, but only while it waits for work, and not if it was gone before the worker had
    come up.
    """
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
