"""Life cycle of data-loading workers: they block signals, and exit when the training process exits."""

import atexit
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait

from megatron.data.tracker import start_tracker


@contextmanager
def block_signals() -> Iterator[None]:
    """Block signals while worker processes start, so that the workers inherit the blocked signals.

    A signal to the whole process group then acts only on the training process, which saves a checkpoint and ends its
    workers.
    """
    signals = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        start_tracker()  # starting the tracker unblocks SIGTERM, so the mask is set again below
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_all() -> None:
    """Kill the workers of this process. Python itself would send SIGTERM, which workers block, and wait for them."""
    for worker in multiprocessing.active_children():
        worker.kill()


def end_all_at_exit() -> None:
    """Kill the workers at exit, so that none outlives this process."""
    atexit.unregister(end_all)
    atexit.register(end_all)


def end_with_parent(_: int) -> None:
    """Start a thread that ends this worker process as soon as its parent process ends.

    torch checks for the parent only while a worker waits for work, and misses a parent that died before the worker
    had started.
    """
    threading.Thread(target=_wait_for_parent, name="end-with-parent", daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
