"""Building the training, validation and test datasets from --data-path and related flags.

Each dataset reads one corpus or a blend of several corpora.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..json_text import read_json
from ..storage import to_path
from .corpus_dataset import CorpusDataset, WrappedDataset
from .corpus_paths import CorpusUse, Paths, corpus_names, corpus_uses, parse_blend, prefixes_of, renamed, stages_in
from .indexed_dataset import DatasetError
from .splits import PARTS, parse_split, split_documents

__all__ = [
    "Make", "Open", "Paths", "build_datasets", "corpus_names", "made_with", "parse_blend", "prefixes_of", "renamed",
    "tokens_of",
]  # fmt: skip

Make = Callable[[range, str], Any]  # dataset factory: (documents, "train", "valid" or "test") -> dataset
Open = Callable[[str], tuple[int, Make]]  # prefix of a corpus -> (number of documents, dataset factory)


class Member(NamedTuple):
    """The data set of one corpus in one part of the run, and the weight of the corpus in its blend."""

    weight: str | None
    prefix: str
    dataset: Any


NamedSets = dict[str, list[Member]]  # name of a data set, "" without names -> its corpora


class NumberedCorpus(WrappedDataset):
    """Data set of one of several corpora. Its samples also have "corpus", the number of the corpus, int64 scalar."""

    def __init__(self, dataset: Any, number: int) -> None:
        super().__init__(dataset)
        self._number = torch.tensor(number)

    def __getitem__(self, n: int) -> dict[str, Any]:
        return {**self.dataset[n], "corpus": self._number}


def build_datasets(open_corpus: Open, paths: Paths, split: str) -> tuple[tuple[Any, Any, Any], list[str]]:
    """Return ((training, validation, test) datasets, notes on empty datasets); an empty dataset is None.

    Validation and test may have several named data sets (see `parse_named_sets`), which are returned as a dict. If
    there are several corpora, each sample has the number of its corpus (see `NumberedCorpus`).

    paths: corpora whose documents `split` divides into the three datasets, or a mapping from `train`, `valid` and
    `test` to corpora of which all documents are used. Training corpora may be in stages.
    open_corpus: opens the corpus of a prefix and returns (number of documents, dataset factory). The factory must raise
    ValueError if the documents do not fill a sample.
    Raises DatasetError if the training dataset is empty.
    """
    prefixes = prefixes_of(paths)
    shares = parse_split(split)
    sets_of_part: dict[str, NamedSets] = {part: {} for part in PARTS}
    notes = list[str]()
    for use in corpus_uses(paths):
        total, make = open_corpus(use.prefix)
        for part, documents in _documents_of(use, shares, total).items():
            description = f"the {part} part of {use.prefix} ({len(documents)} of {total} documents)"
            dataset = _make_or_note(make, documents, part, description, notes)
            if dataset is not None:
                member = Member(use.weight, use.prefix, _label(dataset, use.prefix, prefixes))
                sets_of_part[part].setdefault(use.name, []).append(member)
    if not sets_of_part["train"]:
        advice = "set --train-data-path" if isinstance(paths, Mapping) else f"change --split {split}"
        raise DatasetError(f"there is no training data; {advice}")
    train = _training_set(sets_of_part["train"], paths)
    return (train, _blend_sets(sets_of_part["valid"]), _blend_sets(sets_of_part["test"])), notes


def _make_or_note(make: Make, documents: range, part: str, description: str, notes: list[str]) -> Any:
    """Return the data set, or None with a new note if the documents do not fill a sample of validation or test."""
    try:
        return make(documents, part)
    except DatasetError:  # the corpus is damaged
        raise
    except ValueError as error:
        if part == "train":
            raise DatasetError(f"{description}: {error}") from None
        notes.append(f"{description} is empty: {error}")
        return None


def _documents_of(use: CorpusUse, shares: Sequence[float], total: int) -> dict[str, range]:
    """Return part of the run -> documents of a corpus with `total` documents. shares: fractions of --split."""
    if not use.is_split:
        return {part: range(total) for part in use.parts}
    documents_of_part = {}
    for part, share, documents in zip(PARTS, shares, split_documents(shares, total), strict=True):
        if share and part in use.parts:  # --split may give a part of the run no documents
            documents_of_part[part] = documents
    return documents_of_part


def _label(dataset: Any, prefix: str, prefixes: Sequence[str]) -> Any:
    """Return the data set with its prefix and, if there are several corpora, with the number of its corpus."""
    if isinstance(dataset, CorpusDataset):
        dataset.prefix = prefix
    return NumberedCorpus(dataset, prefixes.index(prefix)) if len(prefixes) > 1 else dataset


def _training_set(sets: NamedSets, paths: Paths) -> Any:
    stages = stages_in(paths)
    if not stages:
        return _blend_sets(sets)
    from .staged import build_staged

    trained = {member.prefix: member.dataset for member in sets[""]}  # training data have no name
    return build_staged(trained, stages, tokens_of(sets[""][0].dataset))


def tokens_of(dataset: Any) -> int:
    """Return the number of tokens of a sample: of encoder and decoder for T5, else of one window."""
    plan = getattr(dataset, "plan", None)
    return plan.encoder + plan.decoder if plan is not None else int(dataset.seq_length)


def _blend_sets(sets: NamedSets) -> Any:
    """Return a data set, a dict from names to data sets if they are named, or None."""
    blends = {name: _blend(members) for name, members in sets.items()}
    return blends.get("") or blends or None


def _blend(members: Sequence[Member]) -> Any:
    if len(members) == 1:
        return members[0].dataset
    from .blend import BlendedDataset

    datasets = [member.dataset for member in members]
    weights = [member.weight or str(member.dataset.samples_per_epoch) for member in members]
    return BlendedDataset(datasets, weights)


def made_with(prefix: str) -> dict[str, Any] | None:
    """Return the metadata in `prefix`.json, which tools/preprocess_data.py writes, or None without this file.

    Raises ValueError if the file is damaged.
    """
    path = to_path(f"{prefix}.json")
    if not path.is_file():
        return None
    try:
        metadata: dict[str, Any] = read_json(path, dict)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged ({error}); copy it again or rebuild the corpus with tools/preprocess_data.py"
        ) from None
    return metadata
