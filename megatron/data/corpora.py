"""Building the training, validation and test datasets from --data-path and related flags.

Each dataset reads one corpus or a blend of several corpora.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .blend import Member, NamedSets, blend_sets, blend_training_set, label_corpus
from .corpus_paths import CorpusUse, Paths, corpus_uses, prefixes_of
from .indexed_dataset import DatasetError
from .splits import PARTS, parse_split, split_documents

DatasetFactory = Callable[[range, str], Any]  # (documents, "train", "valid" or "test") -> dataset
CorpusOpener = Callable[[str], tuple[int, DatasetFactory]]  # prefix -> (number of documents, dataset factory)


def build_datasets(open_corpus: CorpusOpener, paths: Paths, split: str) -> tuple[tuple[Any, Any, Any], list[str]]:
    """Return ((training, validation, test) datasets, notes on empty datasets); an empty dataset is None.

    Validation and test may have several named data sets (see `parse_named_sets`), which are returned as a dict. If
    there are several corpora, each sample has the number of its corpus (see `blend.NumberedCorpus`).

    paths: corpora whose documents `split` divides into the three datasets, or a mapping from `train`, `valid` and
    `test` to corpora of which all documents are used. Training corpora may be in stages.
    open_corpus: opens the corpus of a prefix and returns (number of documents, dataset factory). The factory must raise
    ValueError if the documents do not fill a sample.
    Raises DatasetError if the training dataset is empty.
    """
    prefixes = prefixes_of(paths)
    split_fractions = parse_split(split)
    sets_of_part: dict[str, NamedSets] = {part: {} for part in PARTS}  # part -> name of a data set -> its corpora
    notes = list[str]()
    for use in corpus_uses(paths):
        total, make_dataset = open_corpus(use.prefix)
        for part, documents in _documents_of(use, split_fractions, total).items():
            description = f"the {part} part of {use.prefix} ({len(documents)} of {total} documents)"
            try:
                dataset = make_dataset(documents, part)
            except DatasetError:  # the corpus is damaged
                raise
            except ValueError as error:  # the documents do not fill a sample
                if part == "train":
                    raise DatasetError(f"{description}: {error}") from None
                notes.append(f"{description} is empty: {error}")
                continue
            dataset = label_corpus(dataset, use.prefix, prefixes)
            sets_of_part[part].setdefault(use.name, []).append(Member(use.weight, use.prefix, dataset))

    if not sets_of_part["train"]:
        advice = "set --train-data-path" if isinstance(paths, Mapping) else f"change --split {split}"
        raise DatasetError(f"there is no training data; {advice}")
    train = blend_training_set(sets_of_part["train"], paths)
    return (train, blend_sets(sets_of_part["valid"]), blend_sets(sets_of_part["test"])), notes


def _documents_of(use: CorpusUse, fractions: Sequence[float], total: int) -> dict[str, range]:
    """Return part of the run -> documents of a corpus with `total` documents. fractions: those of --split."""
    # For example, fractions 0.9, 0.1 and 0 give `train` documents 0 to 89 of 100, `valid` the others, `test` none.
    if not use.is_split:
        return dict.fromkeys(use.parts, range(total))
    documents_of_part = {}
    for part, fraction, documents in zip(PARTS, fractions, split_documents(fractions, total), strict=True):
        if fraction and part in use.parts:
            documents_of_part[part] = documents
    return documents_of_part
