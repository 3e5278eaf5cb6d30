"""Assignment of samples to ranks and iterations, computed from the number of consumed samples."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler

from .endless import Endless, collate, pack, unpack
from .workers import block_signals, kill_workers_at_exit, start_worker


@dataclass
class ConsecutiveSampler(Sampler[list[int]]):
    """Endless sampler that yields micro-batches of sample numbers for one data-parallel rank.

    Every rank takes an equal number of consecutive samples of an iteration and splits them into micro-batches. So the
    samples of an iteration do not depend on the number of ranks or micro-batches.

    batch_size: samples of a micro-batch. gas: number of micro-batches of a rank in an iteration (gradient
    accumulation steps), or a function that returns it for the number of an iteration's first sample.
    consumed_samples: number of samples used by earlier iterations.
    is_skipped: called with the number of an iteration's first sample; if it returns True, the iteration is skipped
    and its samples are not read.
    """

    batch_size: int
    gas: int | Callable[[int], int]
    data_rank: int
    data_size: int
    consumed_samples: int = 0
    is_skipped: Callable[[int], bool] | None = None

    def __iter__(self) -> Iterator[list[int]]:
        # With 2 ranks, micro-batches of 3 samples and gas 2, rank 1 reads samples 6-8 and 9-11, then 18-20 and 21-23.
        iteration_begin = self.consumed_samples
        while True:
            gas = self.gas(iteration_begin) if callable(self.gas) else self.gas  # micro-batches of each rank
            samples_per_rank = self.batch_size * gas
            if self.is_skipped is None or not self.is_skipped(iteration_begin):
                rank_begin = iteration_begin + self.data_rank * samples_per_rank
                for first in range(rank_begin, rank_begin + samples_per_rank, self.batch_size):
                    yield list(range(first, first + self.batch_size))
            iteration_begin += samples_per_rank * self.data_size  # past the samples of all ranks, skipped or not


class _Loader(DataLoader[Any]):
    def __iter__(self) -> Any:
        with block_signals():  # super().__iter__() starts the worker processes, which inherit the blocked signals
            batches = super().__iter__()
        return map(unpack, batches) if self.num_workers else batches


def build_loader(
    dataset: Dataset[Any], sampler: ConsecutiveSampler, num_workers: int = 0, read_ahead: bool = False, seed: int = 0
) -> Iterable[Any]:
    """Return a loader that yields micro-batches in the order of `sampler`, for any number of workers.

    read_ahead: without workers, let threads read the next micro-batches. For corpora in object storage, whose blocks
    take long to arrive. Workers read ahead anyway. seed: see `Endless`.
    """
    endless = Endless(dataset, seed)
    if read_ahead and not num_workers:
        from .read_ahead import read_ahead_of

        return read_ahead_of(endless, sampler)
    if num_workers:
        kill_workers_at_exit()
    return _Loader(
        endless,
        batch_sampler=sampler,
        collate_fn=pack if num_workers else collate,  # workers send bytes, not shared memory; `_Loader` unpacks them
        num_workers=num_workers,
        # Unlike forked workers, spawned workers do not inherit threads or accelerator state. Unlike workers of a
        # forkserver, they are children of this process, so they notice when it dies.
        multiprocessing_context="spawn" if num_workers else None,
        persistent_workers=bool(num_workers),
        worker_init_fn=start_worker,
    )
