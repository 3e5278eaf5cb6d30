"""Training data set whose blend of corpora changes during the run (`--data-stages`).

Each corpus has a counter of its own: a stage reads on in each corpus where the earlier stages stopped. So no sample is
read twice or skipped, whether a corpus stays, is added, is removed or comes back. Sample n depends only on the stages
up to n.
"""

import copy
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from ..config.data_stages import Stage
from .blend import BlendedDataset, with_own_draws
from .fingerprints import content_fingerprint
from .indexed_dataset import DatasetError

Ints = NDArray[np.int64]
MOST_CORPORA = 1 << 16


class _StageBlend(NamedTuple):
    """A stage.

    begin: number of its first sample. members: index of each of its corpora among all corpora of the run.
    read_before: number of samples that the earlier stages have read from each corpus of the run.
    """

    begin: int
    members: Ints
    blend: BlendedDataset
    read_before: Ints


class StagedDataset(Dataset[dict[str, Tensor]]):
    """Samples of several corpora, in stages.

    datasets: one data set for each corpus of the run, in the order in which stages first use them.
    stages: for each stage the number of its first sample, and index of a corpus -> weight.
    begins: number of the first sample of each stage.
    salts: for each corpus a number that `sample_ids` mixes into the ids of later stages, such as a hash of its content.
    prefixes: prefix of each corpus, for `with_former_ids`.
    Raises ValueError if the stages are not in order.
    """

    def __init__(
        self,
        datasets: Sequence[Any],
        stages: Sequence[tuple[int, dict[int, str]]],
        salts: Sequence[int] | None = None,
        prefixes: Sequence[str] = (),
    ) -> None:
        self.datasets = list(datasets)
        self._prefixes = prefixes
        # A salt may use all 64 bits, but ids are int64, so its bits are read as a signed number. 0 changes no id.
        self._salts = np.array(salts or [0] * len(datasets), np.uint64).astype(np.int64)
        self.plan = getattr(datasets[0], "plan", None)  # T5 only: sequence lengths, the same for all data sets
        self.begins = [begin for begin, _ in stages]
        self._stages: list[_StageBlend] = []
        read_before = np.zeros(len(datasets), np.int64)
        blended_datasets = list(map(with_own_draws, datasets))
        for begin, weights in stages:
            # Count what the previous stage reads from each of its corpora before this stage begins.
            if self._stages:
                previous = self._stages[-1]
                if begin <= previous.begin:
                    raise ValueError(f"a stage at sample {begin} follows a stage at sample {previous.begin}")
                read_before = read_before.copy()  # the previous stage keeps its own array
                read_before[previous.members] += previous.blend.consumed_per_corpus(begin - previous.begin)

            members = np.array(list(weights), np.int64)
            # A stage of one corpus draws as a run of this corpus does, whatever the other stages are.
            sources = blended_datasets if len(members) > 1 else self.datasets
            stage_datasets = [sources[i] for i in members]
            blend = BlendedDataset(stage_datasets, list(weights.values()))
            self._stages.append(_StageBlend(begin, members, blend, read_before))

    def with_former_ids(self, fingerprint: Callable[[str], str]) -> "StagedDataset":
        """Return a copy whose `sample_ids` are those of an earlier version, whose checkpoints contain hashes of them.

        fingerprint: function by which that version made the salts; one of FORMER_FINGERPRINTS.
        """
        former = copy.copy(self)
        if self._prefixes:
            former._salts = np.array(_salts_of(self._prefixes, fingerprint), np.uint64).astype(np.int64)
        return former

    def _stage_index(self, n: int) -> int:
        return bisect_right(self.begins, n) - 1

    def _locate_in_stage(self, n: int) -> tuple[_StageBlend, int, int]:
        """Return (stage, index of the corpus among those of the stage, sample index in that corpus) of sample n."""
        stage = self._stages[self._stage_index(n)]
        member, number = stage.blend.locate(n - stage.begin)
        return stage, member, int(stage.read_before[stage.members[member]]) + number

    def locate(self, n: int) -> tuple[int, int]:
        """Return (corpus index, sample index in that corpus) of sample n."""
        stage, member, number = self._locate_in_stage(n)
        return int(stage.members[member]), number

    def __getitem__(self, n: int) -> dict[str, Tensor]:
        stage, member, number = self._locate_in_stage(n)
        return stage.blend.datasets[member][number]  # type: ignore[no-any-return]

    def consumed_per_corpus(self, samples: int) -> list[int]:
        """Return how many of the first `samples` samples come from each corpus."""
        stage = self._stages[self._stage_index(max(samples - 1, 0))]  # that of the last of these samples
        counts = stage.read_before.copy()
        counts[stage.members] += stage.blend.consumed_per_corpus(samples - stage.begin)
        return [int(count) for count in counts]

    def sample_ids(self, first: int, count: int) -> Ints:
        """Return an id for each sample from `first` to `first + count` - 1; no two samples of a stage share an id.

        The ids of the first stage are those of its `BlendedDataset`, so a run without stages can continue with stages.
        """
        ids = [np.empty(0, np.int64)]
        end = first + count
        while first < end:
            index = self._stage_index(first)
            stage = self._stages[index]
            # The samples of this stage end where the next stage begins, or at `end`.
            part_end = min([end, *self.begins[index + 1 :]])
            if index:  # not the first stage
                ids.append(self._later_sample_ids(stage, first - stage.begin, part_end - first))
            else:
                ids.append(stage.blend.sample_ids(first, part_end - first))
            first = part_end
        return np.concatenate(ids)

    def _later_sample_ids(self, stage: _StageBlend, first: int, count: int) -> Ints:
        """Return an id for each of `count` samples of a stage after the first one; `first` counts within the stage.

        Unlike the ids of a blend, these do not depend on which other corpora the stage has.
        """
        members, numbers = stage.blend.locate_all(first, count)
        ids = np.empty(count, np.int64)
        for member, corpus in enumerate(stage.members):
            positions = np.flatnonzero(members == member)
            if len(positions):
                # The samples that a stage takes from one corpus are contiguous in the corpus: `sample_ids` gives all.
                first_number = int(numbers[positions[0]]) + int(stage.read_before[corpus])
                # Ids of different corpora must differ; the salt adds what the corpus contains to the sample hash.
                corpus_ids = self.datasets[corpus].sample_ids(first_number, len(positions))
                ids[positions] = (corpus_ids * MOST_CORPORA + corpus) ^ self._salts[corpus]
        return ids

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples of the first stage's blend until one of its corpora has been read completely."""
        return self._stages[0].blend.samples_per_epoch


def _salts_of(prefixes: Sequence[str], fingerprint: Callable[[str], str]) -> list[int]:
    return [int(fingerprint(prefix), 16) for prefix in prefixes]


def build_staged(trained: Mapping[str, Any], stages: Sequence[Stage], tokens: int) -> StagedDataset:
    """Return the training data set of `stages`.

    trained: prefix -> data set of a corpus. tokens: tokens of a sample.
    Raises DatasetError if the begin of a stage is not after that of the stage before it.
    """
    index_of = {prefix: i for i, prefix in enumerate(trained)}
    blends = []
    for stage in stages:
        weights = {}
        for weight, prefix in stage.blend:
            # Without weights, the corpora are mixed in proportion to their sizes.
            weights[index_of[prefix]] = weight or str(trained[prefix].samples_per_epoch)
        blends.append((stage.in_samples(tokens).begin, weights))
    prefixes = list(trained)
    salts = _salts_of(prefixes, content_fingerprint)
    try:
        return StagedDataset(list(trained.values()), blends, salts, prefixes)
    except ValueError as error:
        raise DatasetError(f"--data-stages: {error}; a sample has {tokens} tokens") from None
