"""Building the training, validation and test datasets from --data-path and related flags.

Each dataset reads one corpus or a blend of several corpora.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..json_text import describe_json
from ..storage import place
from .blend import BlendedDataset
from .indexed_dataset import DatasetError
from .splits import PARTS, parse_split, split_documents

Paths = str | Sequence[str] | Mapping[str, Sequence[str]]
Make = Callable[[range, str], Any]  # dataset factory: (documents, "train", "valid" or "test") -> dataset
Open = Callable[[str], tuple[int, Make]]  # prefix of a corpus -> (number of documents, dataset factory)


def parse_blend(words: str | Sequence[str]) -> list[tuple[str | None, str]]:
    """Parse `0.7 a 0.3 b`, `a` or `a b` into pairs (weight, prefix).

    Without weights, corpora are sampled in proportion to their size. Raises DatasetError if `words` has another form.
    """
    words = [word for each in ([words] if isinstance(words, str) else words) for word in _split(each)]
    if len(words) < 2 or not _is_number(words[0]):
        if any(_is_number(word) and not Path(f"{word}.idx").exists() for word in words):
            raise DatasetError(
                f"--data-path {' '.join(words)} must be pairs of a weight and a prefix, as in 0.7 a 0.3 b"
            )
        return [(None, word) for word in words]
    weights, prefixes = words[::2], words[1::2]
    if len(weights) != len(prefixes) or not all(_is_number(w) and float(w) > 0 for w in weights):
        raise DatasetError(
            f"--data-path {' '.join(words)} must be pairs of a positive weight and a prefix, as in 0.7 a 0.3 b"
        )
    return list(zip(weights, prefixes, strict=True))


def _split(word: str) -> list[str]:
    """Split a quoted list such as "0.7 a 0.3 b" into its words; return a prefix that contains spaces unchanged."""
    parts = word.split()
    return parts if len(parts) > 1 and _is_number(parts[0]) else [word]


def _is_number(word: str) -> bool:
    try:
        return float(word) == float(word)
    except ValueError:
        return False


def prefixes_of(paths: Paths) -> list[str]:
    """Return the prefixes of all corpora in `paths`."""
    groups = paths.values() if isinstance(paths, Mapping) else [paths]
    return list(dict.fromkeys(prefix for group in groups for _, prefix in parse_blend(group)))


def build_datasets(open_: Open, paths: Paths, split: str) -> tuple[tuple[Any, Any, Any], list[str]]:
    """Return ((training, validation, test) datasets, notes on empty datasets); an empty dataset is None.

    paths: corpora whose documents `split` divides into the three datasets, or a mapping from `train`, `valid` and
    `test` to corpora of which all documents are used.
    open_: opens the corpus of a prefix and returns (number of documents, dataset factory). The factory must raise
    ValueError if the documents do not fill a sample.
    Raises DatasetError if the training dataset is empty.
    """
    notes: list[str] = []
    found: dict[str, list[tuple[str | None, Any]]] = {part: [] for part in PARTS}

    def add(part: str, weight: str | None, prefix: str, make: Make, chosen: range, total: int) -> None:
        try:
            found[part].append((weight, make(chosen, part)))
        except DatasetError:
            raise
        except ValueError as error:
            where = f"the {part} part of {prefix} ({len(chosen)} of {total} documents)"
            if part == "train":
                raise DatasetError(f"{where}: {error}") from None
            notes.append(f"{where} is empty: {error}")

    if isinstance(paths, Mapping):
        for part in PARTS:
            for weight, prefix in parse_blend(paths.get(part, ())):
                total, make = open_(prefix)
                add(part, weight, prefix, make, range(total), total)
    else:
        shares = parse_split(split)
        for weight, prefix in parse_blend(paths):
            total, make = open_(prefix)
            for part, chosen, share in zip(PARTS, split_documents(shares, total), shares, strict=True):
                if share:
                    add(part, weight, prefix, make, chosen, total)
    if not found["train"]:
        raise DatasetError(
            "there is no training data; "
            + (f"change --split {split}" if not isinstance(paths, Mapping) else "set --train-data-path")
        )
    train, valid, test = (_blend(found[part]) for part in PARTS)
    return (train, valid, test), notes


def _blend(members: list[tuple[str | None, Any]]) -> Any:
    if len(members) < 2:
        return members[0][1] if members else None
    datasets = [dataset for _, dataset in members]
    weights = [weight or str(dataset.samples_per_epoch) for weight, dataset in members]
    return BlendedDataset(datasets, weights)


def made_with(prefix: str) -> dict[str, Any] | None:
    """Return the metadata in `prefix`.json, which tools/preprocess_data.py writes, or None without this file.

    Raises ValueError if the file is damaged.
    """
    path = place(f"{prefix}.json")
    if not path.is_file():
        return None
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        about = json.loads(text)
    except (OSError, ValueError) as error:
        words = describe_json(text, error) if isinstance(error, ValueError) and text else str(error)
        raise ValueError(
            f"{path} is damaged ({words}); copy it again or rebuild the corpus with tools/preprocess_data.py"
        ) from None
    if not isinstance(about, dict):
        raise ValueError(
            f"{path} is not a JSON object; copy it again or rebuild the corpus with tools/preprocess_data.py"
        )
    return about
