"""Start and end of data workers: workers block signals, and exit when the training process exits."""

import atexit
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait

from .tracker import start_tracker

SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}  # signals that a run handles
# Error of torch's DataLoader about a worker that ended.
_WORKER_ENDED = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:is killed by signal: ([^.]+)|exited)")


def describe_worker_end(error: BaseException) -> str | None:
    """Return one sentence if `error` says that a data worker has ended or cannot get its data set, else None.

    Also describes NCCL's error about /dev/shm, which concerns no data worker.
    """
    text = str(error)
    if "/dev/shm/nccl" in text:
        return f"NCCL may have too little /dev/shm: start the container with --shm-size=8g or --ipc=host ({text})"
    # Torch's error about tensors that it sends. Other errors name the shared memory of a GPU.
    if "shared memory(shm)" in text:
        return f"/dev/shm is too small for the tensors of the data set: give arrays, or pass --num-workers 0 ({text})"
    match = _WORKER_ENDED.search(text)
    if not match:
        return None
    cause = f"was killed by the signal {match[2].strip()!r}" if match[2] else "ended"
    return (
        f"the data worker with process id {match[1]} {cause}; if it has printed no error above, the machine may have "
        "too little memory: lower --num-workers, or pass --num-workers 0"
    )


@contextmanager
def block_signals() -> Iterator[None]:
    """Block SIGTERM, SIGINT and SIGUSR1 while worker processes start, so that the workers block these signals, too.

    Then a signal to the whole process group acts on the training process only. The training process saves a checkpoint
    and ends its workers.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        start_tracker()  # unblocks SIGTERM and SIGINT, so the next line blocks the signals again
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def in_main_thread() -> bool:
    """Return whether this thread is the main thread, the only one in which Python can set signal handlers."""
    return threading.current_thread() is threading.main_thread()


def kill_workers() -> None:
    """Kill the workers of this process.

    Otherwise, at exit, Python would send SIGTERM to the workers, which block this signal, and wait for them.
    """
    if in_main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise an error for each of them
    for worker in multiprocessing.active_children():
        worker.kill()


def kill_workers_at_exit() -> None:
    """Kill the workers when this process exits, so that no worker outlives it."""
    atexit.unregister(kill_workers)
    atexit.register(kill_workers)


def start_worker(_: int = 0) -> None:
    """Start a thread that ends this worker process as soon as its parent process ends. _: its number, for PyTorch.

    PyTorch checks whether the parent is alive only while a worker waits for work. It does not notice that the parent
    died before the worker had started.
    """
    threading.Thread(target=_wait_for_parent, name="end-with-parent", daemon=True).start()


def _wait_for_parent() -> None:
    """End this process as soon as its parent has ended, even if the parent was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
