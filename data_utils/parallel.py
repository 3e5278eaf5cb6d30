"""`map` over worker processes: results in the order of the items, a bounded number of them under way."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
AHEAD = 3  # items under way for each worker


def ordered_map(
    work: Callable[[Item], Result],
    items: Iterable[Item],
    workers: int,
    start: Callable[..., None],
    settings: tuple[Any, ...],
) -> Iterator[Result]:
    """`map(work, items)` by `workers` processes (0: in this one); each first calls `start(*settings)`.

    Raises what `work` raises, and RuntimeError if a worker dies.
    """
    if workers == 0:
        start(*settings)
        yield from map(work, items)
        return
    under_way: deque[Future[Result]] = deque()
    with ProcessPoolExecutor(workers, get_context("spawn"), start, settings) as pool:
        try:
            for item in items:
                under_way.append(pool.submit(work, item))
                if len(under_way) >= workers * AHEAD:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        except BrokenProcessPool:
            raise RuntimeError("a worker process died, perhaps for lack of memory; try fewer --workers") from None
        finally:
            pool.shutdown(cancel_futures=True)
