"""Training data set whose blend of corpora changes during the run (`--data-stages`).

Each corpus has a counter of its own: a stage reads on in each corpus where the earlier stages stopped. So no sample is
read twice or skipped, whether a corpus stays, is added, is removed or comes back. Sample n depends only on the stages
up to n.
"""

import copy
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from ..config.data_stages import Stage
from .blend import BlendedDataset
from .fingerprints import content_fingerprint, corpus_fingerprint
from .indexed_dataset import DatasetError

Ints = NDArray[np.int64]
MOST_CORPORA = 1 << 16


class _Part(NamedTuple):
    """A stage.

    begin: number of its first sample. members: index of each of its corpora among all corpora of the run.
    before: number of samples that the earlier stages have read from each corpus of the run.
    """

    begin: int
    members: Ints
    blend: BlendedDataset
    before: Ints


class StagedDataset(Dataset[dict[str, Tensor]]):
    """Samples of several corpora, in stages.

    datasets: one data set for each corpus of the run, in the order in which stages first use them.
    stages: for each stage the number of its first sample, and index of a corpus -> weight.
    begins: number of the first sample of each stage.
    salts: for each corpus a number that `places` mixes into the ids of later stages, such as a hash of its content.
    former_salts: those numbers of earlier versions, for `with_former_ids`.
    Raises ValueError if the stages are not in order.
    """

    def __init__(
        self,
        datasets: Sequence[Any],
        stages: Sequence[tuple[int, dict[int, str]]],
        salts: Sequence[int] | None = None,
        former_salts: Sequence[int] | None = None,
    ) -> None:
        self.datasets = list(datasets)
        self._former_salts = former_salts
        self._salts = np.array(salts or [0] * len(datasets), np.uint64).astype(np.int64)
        self.plan = getattr(datasets[0], "plan", None)  # T5 only: sequence lengths, the same for all data sets
        self.begins = [begin for begin, _ in stages]
        self._parts: list[_Part] = []
        before = np.zeros(len(datasets), np.int64)
        for begin, weights in stages:
            if self._parts:
                last = self._parts[-1]
                if begin <= last.begin:
                    raise ValueError(f"a stage at sample {begin} follows a stage at sample {last.begin}")
                before = before.copy()
                before[last.members] += last.blend.consumed(begin - last.begin)
            members = np.array(list(weights), np.int64)
            blend = BlendedDataset([self.datasets[i] for i in members], list(weights.values()))
            self._parts.append(_Part(begin, members, blend, before))

    def with_former_ids(self) -> "StagedDataset":
        """Return a copy whose `places` are those of earlier versions, which checkpoints of these versions contain."""
        former = copy.copy(self)
        if self._former_salts is not None:
            former._salts = np.array(self._former_salts, np.uint64).astype(np.int64)
        return former

    def _at(self, n: int) -> int:
        return bisect_right(self.begins, n) - 1

    def locate(self, n: int) -> tuple[int, int]:
        """Return (corpus index, sample index in that corpus) of sample n."""
        part = self._parts[self._at(int(n))]
        which, k = part.blend.locate(int(n) - part.begin)
        corpus = int(part.members[which])
        return corpus, int(part.before[corpus]) + k

    def __getitem__(self, n: int) -> dict[str, Tensor]:
        which, k = self.locate(n)
        sample: dict[str, Tensor] = self.datasets[which][k]
        return sample

    def consumed(self, samples: int) -> list[int]:
        """Return how many of the first `samples` samples come from each corpus."""
        part = self._parts[self._at(max(samples - 1, 0))]
        found = part.before.copy()
        found[part.members] += part.blend.consumed(samples - part.begin)
        return [int(count) for count in found]

    def places(self, first: int, count: int) -> Ints:
        """Return an id for each sample from `first` to `first + count` - 1; no two samples of a stage share an id.

        The ids of the first stage are those of its `BlendedDataset`, so a run without stages can continue with stages.
        """
        found = [np.empty(0, np.int64)]
        end = first + count
        while first < end:
            at = self._at(first)
            part = self._parts[at]
            stop = min(end, self._parts[at + 1].begin if at + 1 < len(self._parts) else end)
            if at:
                found.append(self._later_places(part, first - part.begin, stop - first))
            else:
                found.append(part.blend.places(first, stop - first))
            first = stop
        return np.concatenate(found)

    def _later_places(self, part: _Part, first: int, count: int) -> Ints:
        owners, numbers = part.blend.locate_all(first, count)
        found = np.empty(count, np.int64)
        for which, corpus in enumerate(part.members):
            mine = np.flatnonzero(owners == which)
            if len(mine):
                k = int(numbers[mine[0]]) + int(part.before[corpus])
                found[mine] = self.datasets[corpus].places(k, len(mine)) * MOST_CORPORA + corpus ^ self._salts[corpus]
        return found

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples of the first stage's blend until one of its corpora has been read completely."""
        return self._parts[0].blend.samples_per_epoch


def build_staged(trained: Mapping[str, Any], stages: Sequence[Stage], tokens: int) -> StagedDataset:
    """Return the training data set of `stages`.

    trained: prefix -> data set of a corpus. tokens: tokens of a sample.
    Raises DatasetError if the begin of a stage is not after that of the stage before it.
    """
    numbers = {prefix: i for i, prefix in enumerate(trained)}
    blends = []
    for stage in stages:
        weights = {}
        for weight, prefix in stage.blend:
            weights[numbers[prefix]] = weight or str(trained[prefix].samples_per_epoch)
        blends.append((stage.in_samples(tokens).begin, weights))
    salts = [int(content_fingerprint(prefix), 16) for prefix in trained]
    former_salts = [int(corpus_fingerprint(prefix), 16) for prefix in trained]
    try:
        return StagedDataset(list(trained.values()), blends, salts, former_salts)
    except ValueError as error:
        raise DatasetError(f"--data-stages: {error}; a sample has {tokens} tokens") from None
