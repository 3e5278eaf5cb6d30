"""Reading of micro-batches ahead by threads, for corpora in object storage, whose blocks take long to arrive."""

import pickle
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch.utils.data import Dataset

from .endless import collate

THREADS = 4  # threads that read a remote corpus
BATCHES_AHEAD = 8  # micro-batches that they read ahead


def read_ahead_of(dataset: Dataset[Any], sampler: Iterable[list[int]]) -> Iterator[Any]:
    """Yield micro-batches in the order of `sampler`; threads read the next ones meanwhile.

    Each thread has a copy of the data set, because data sets may not be used by several threads. The samples must not
    depend on the random number generators of torch, NumPy and Python. An error of a data set is raised as it is.
    """
    thread_state = threading.local()
    pickled = pickle.dumps(dataset)

    def read_batch(numbers: list[int]) -> Any:
        # Not in an initializer of the pool, which would replace an error by one without its reason.
        if not hasattr(thread_state, "dataset"):
            thread_state.dataset = pickle.loads(pickled)
        return collate([thread_state.dataset[n] for n in numbers])

    pool = ThreadPoolExecutor(THREADS, "read-ahead")
    waiting = deque[Future[Any]]()
    try:
        for numbers in sampler:  # the sampler is endless, so batches are always waiting
            waiting.append(pool.submit(read_batch, numbers))
            if len(waiting) > BATCHES_AHEAD:
                yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
