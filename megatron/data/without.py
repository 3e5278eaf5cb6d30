"""Training without certain documents (`--without`): samples that contain them are replaced, all others stay in place.

Each such sample is replaced by a sample of the same corpus and the same epoch that contains none of the documents. So
the run without the documents differs from the run with them only in the replaced samples.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..config import Config
from ..config.without import NO_NAME, Omission, parse_without
from .corpora import corpus_names, prefixes_of
from .corpus_dataset import CorpusDataset, WrappedDataset
from .indexed_dataset import DatasetError
from .skips import Range, parse_ranges

Ints = NDArray[np.int64]
KEPT = 64  # number of epochs of corpora whose replacements are kept in memory
DRAW = 2  # number of the random stream that chooses replacements; SampleOrder uses the streams 0 and 1


class Rule(NamedTuple):
    """Documents to leave out from sample `begin` on, as index of a corpus -> document numbers [n]."""

    begin: int
    documents: Mapping[int, Ints]


class Reading(NamedTuple):
    """Place in a corpus; samples `begin` to `end` - 1 of the run that come to this place read a certain sample."""

    begin: int
    end: float
    place: int


class DatasetWithout(WrappedDataset):
    """Training data set `dataset` without some documents.

    The ids of samples (`places`) are those of `dataset`: they identify places, not the samples that are read there.
    rules: the documents to leave out, in the order of `begin`.
    """

    def __init__(self, dataset: Any, rules: Sequence[Rule]) -> None:
        super().__init__(dataset)
        self.rules = list(rules)
        self._begins = [rule.begin for rule in rules]
        self._members = members_of(dataset)
        self._kept: OrderedDict[tuple[int, int, int], tuple[Ints, Ints]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle for worker processes, which compute the replacements again."""
        return {**self.__dict__, "_kept": OrderedDict()}

    def locate(self, n: int) -> tuple[int, int]:
        """Return (corpus index, sample index in that corpus) of the sample that is read at place n."""
        corpus, k = locate(self.dataset, n)
        rule = bisect_right(self._begins, int(n)) - 1
        if corpus not in self.rules[rule].documents:
            return corpus, k
        replaced, others = self.replacements(rule, corpus, k // self._members[corpus].samples_per_epoch)
        at = int(replaced.searchsorted(k))
        return corpus, int(others[at]) if at < len(replaced) and replaced[at] == k else k

    def __getitem__(self, n: int) -> dict[str, Tensor]:
        corpus, k = self.locate(n)
        sample: dict[str, Tensor] = self._members[corpus][k]
        return sample

    def replacements(self, rule: int, corpus: int, epoch: int) -> tuple[Ints, Ints]:
        """Return (samples of an epoch of a corpus that are replaced, samples that are read instead), both [n].

        Raises DatasetError if every sample of the epoch contains one of the documents.
        """
        key = rule, corpus, epoch
        if key not in self._kept:
            if len(self._kept) >= KEPT:
                self._kept.popitem(last=False)
            self._kept[key] = self._choose(*key)
        return self._kept[key]

    def _choose(self, rule: int, corpus: int, epoch: int) -> tuple[Ints, Ints]:
        member = self._members[corpus]
        replaced = member.containing(self.rules[rule].documents[corpus], epoch)
        count = member.samples_per_epoch
        rest = np.delete(np.arange(epoch * count, (epoch + 1) * count), replaced - epoch * count)
        if not len(rest):
            raise DatasetError(
                f"--without: each of the {count} samples of an epoch of {member.prefix} contains a document to leave "
                f"out; leave out fewer documents, or take the corpus out of the training data"
            )
        others = np.random.default_rng([*member.order.seed, epoch, DRAW]).permutation(rest)
        return replaced, np.resize(others, len(replaced))

    def readings(self, corpus: int, epoch: int, samples: Ints) -> Iterator[Reading]:
        """Yield where `samples` of an epoch of a corpus are read."""
        for i, (rule, end) in enumerate(zip(self.rules, [*self._begins[1:], float("inf")], strict=True)):
            replaced, others = np.empty((2, 0), np.int64)
            if corpus in rule.documents:
                replaced, others = self.replacements(i, corpus, epoch)
            for k in np.setdiff1d(samples, replaced).tolist():
                yield Reading(rule.begin, end, k)
            for place in replaced[np.isin(others, samples)].tolist():
                yield Reading(rule.begin, end, place)


def members_of(dataset: Any) -> list[Any]:
    """Return the data sets of a training data set's corpora."""
    return list(getattr(dataset, "datasets", [dataset]))


def locate(dataset: Any, n: int) -> tuple[int, int]:
    """Return (corpus index, sample index in that corpus) of sample n of a training data set."""
    found: tuple[int, int] = dataset.locate(n) if hasattr(dataset, "locate") else (0, int(n))
    return found


def without(dataset: Any, config: Config) -> tuple[Any, list[str]]:
    """Return (training data set without the documents of --without, notes). Without --without, return `dataset`.

    Raises DatasetError if --without names a corpus that the run does not have, or leaves no samples.
    """
    if config.data.without is None or dataset is None:
        return dataset, []
    members = members_of(dataset)
    if not all(isinstance(getattr(each, "dataset", each), CorpusDataset) for each in members):
        raise DatasetError("--without needs the data sets of this project, which read .bin/.idx pairs; leave it out")
    omissions = parse_without(config.data.without)
    short = dict(zip(prefixes_of(config.data.paths), corpus_names(config.data.paths), strict=True))
    alone = {NO_NAME} if len(short) == 1 else set()
    names = [{each.prefix, short.get(each.prefix, each.prefix)} | alone for each in members]
    _check_names(omissions, names, sorted(short))
    rules = []
    given = dict[int, tuple[Range, ...]]()
    for begin, documents in omissions:
        words = ([r for name in mine for r in documents.get(name, [])] for mine in names)
        given = {i: parse_ranges(each) for i, each in enumerate(words) if each}
        rules.append(Rule(begin, {i: _documents(each, members[i].documents) for i, each in given.items()}))
    found = DatasetWithout(dataset, rules)
    return found, [_note(found, i, ranges) for i, ranges in sorted(given.items())]


def _check_names(omissions: Sequence[Omission], names: Sequence[set[str]], prefixes: Sequence[str]) -> None:
    given = {name for each in omissions for name in each.documents}
    unknown = sorted(given - set().union(*names))
    if NO_NAME in unknown:
        raise DatasetError(
            f"--without names documents without their corpus, but the run has {len(prefixes)} corpora; write each line "
            f"as PREFIX NUMBER, with a prefix of {', '.join(prefixes)}"
        )
    if unknown:
        raise DatasetError(
            f"--without: the training data have no corpus {unknown[0]}; the corpora are {', '.join(prefixes)}"
        )


def _documents(ranges: Sequence[Range], used: range) -> Ints:
    """Return the numbers in `ranges` that are among the documents `used`, in order."""
    inside = [np.arange(min(max(first, used.start), used.stop), min(last + 1, used.stop)) for first, last in ranges]
    return np.unique(np.concatenate(inside))


def _count(ranges: Sequence[Range]) -> int:
    """Return how many numbers are in `ranges`, each counted once."""
    count = 0
    reached = -1
    for first, last in sorted(ranges):
        count += max(last - max(first, reached + 1) + 1, 0)
        reached = max(reached, last)
    return count


def _note(dataset: DatasetWithout, corpus: int, ranges: Sequence[Range]) -> str:
    """Return a sentence on how many samples the last rule replaces, and on documents that training does not use."""
    rule = len(dataset.rules) - 1
    documents = dataset.rules[rule].documents[corpus]
    member = members_of(dataset)[corpus]
    replaced, _ = dataset.replacements(rule, corpus, 0)
    used = member.documents
    others = _count(ranges) - len(documents)
    return (
        f"--without: documents of {member.prefix} to leave out: {len(documents)}; other samples replace "
        f"{len(replaced)} of the {member.samples_per_epoch} samples of an epoch"
        + (f"; {others} of the numbers are not training documents ({used.start} to {used.stop - 1})" if others else "")
    )
