"""`map` over worker processes with ordered results and a bounded number of items in flight."""

import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

from megatron.data.tracker import start_tracker
from megatron.data.workers import start_worker

from .on_ray import ITEMS_PER_PROCESS, Item, Result, ordered_map_on_ray


def _initialize_worker(start: Callable[..., None], settings: tuple[Any, ...]) -> None:
    """Initialise a worker process, and make it exit when its parent process dies.

    The pool ends its workers only if the parent exits normally.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to workers, too; the parent ends them
    start_worker()
    start(*settings)


def ordered_map(
    work: Callable[[Item], Result],
    items: Iterable[Item],
    workers: int,
    start: Callable[..., None],
    settings: tuple[Any, ...],
    cluster: str | None,
) -> Iterator[Result]:
    """Yield the results of `map(work, items)`, computed by worker processes.

    workers: number of processes; 0 computes in the calling process. Each process first calls `start(*settings)`.
    cluster: address of a Ray cluster that runs the processes (on_ray.py).
    Raises RuntimeError if a worker process dies, and passes on the errors of `work`.
    """
    if cluster:
        yield from ordered_map_on_ray(work, items, workers, start, settings, cluster)
        return
    if workers == 0:
        start(*settings)
        yield from map(work, items)
        return
    start_tracker()  # before the pool starts it, as the pool would leave its warnings on
    pending: deque[Future[Result]] = deque()
    with ProcessPoolExecutor(workers, get_context("spawn"), _initialize_worker, (start, settings)) as pool:
        try:
            for item in items:
                pending.append(pool.submit(work, item))
                # The oldest item first, so that results come in the order of the items.
                if len(pending) >= workers * ITEMS_PER_PROCESS:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise RuntimeError(
                "a worker process died; if it has printed no error above, the machine may have too little memory: try "
                "fewer --workers"
            ) from None
        finally:
            # Otherwise, after an error, the end of `with` would wait until all pending items are computed.
            pool.shutdown(cancel_futures=True)
