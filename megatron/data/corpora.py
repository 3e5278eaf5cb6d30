"""Building the training, validation and test datasets from --data-path and related flags.

Each dataset reads one corpus or a blend of several corpora.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..config.data_stages import Stage, Staged, prefixes_in
from ..json_text import read_json
from ..storage import RemotePath, place
from .blend import BlendedDataset
from .corpus_dataset import CorpusDataset, WrappedDataset
from .indexed_dataset import LOSS, DatasetError
from .splits import PARTS, parse_split, split_documents
from .staged import StagedDataset

Paths = str | Sequence[str] | Staged | Mapping[str, Sequence[str] | Staged]
Make = Callable[[range, str], Any]  # dataset factory: (documents, "train", "valid" or "test") -> dataset
ENDS = 1 << 16  # number of bytes hashed at the start and at the end of a file
SAMPLES, SAMPLED = 256, 4096  # number and bytes of the blocks of a file that are hashed in addition
REQUESTS = 16  # requests to object storage at the same time
NAMED = re.compile(r"([A-Za-z][\w.-]*)=(.+)")  # a word that names a data set: web=data/a
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
    weights = words[::2]
    prefixes = words[1::2]
    if len(weights) != len(prefixes) or not all(_is_number(w) and float(w) > 0 for w in weights):
        raise DatasetError(
            f"--data-path {' '.join(words)} must be pairs of a positive weight and a prefix, as in 0.7 a 0.3 b"
        )
    return list(zip(weights, prefixes, strict=True))


def renamed(word: str, change: Callable[[str], str]) -> str:
    """Return a word of --data-path, perhaps with a name or a quoted blend, with each prefix changed by `change`."""
    match = NAMED.match(word)
    name, blend = (f"{match[1]}=", match[2]) if match else ("", word)
    return name + " ".join(each if _is_number(each) else change(each) for each in _split(blend))


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
    parts = paths if isinstance(paths, Mapping) else {"train": paths}
    found: list[str] = []
    for part, words in parts.items():
        if isinstance(words, Staged):
            found += prefixes_in(words.stages)
            words = words.held_out or ()
        found += [prefix for blend in sets_of(words, part).values() for _, prefix in parse_blend(blend)]
    return list(dict.fromkeys(found))


def sets_of(words: str | Sequence[str], part: str) -> dict[str, str | Sequence[str]]:
    """Return name -> blend of the data sets in `web=a "books=0.7 b 0.3 c"`; {"": words} if the words have no names.

    part: "train", "valid" or "test".
    Raises DatasetError if only some words have a name, if two have the same, or if training data have a name.
    """
    each = [words] if isinstance(words, str) else words
    named = [(match[1], match[2]) for word in each if (match := NAMED.match(word)) and not Path(f"{word}.idx").exists()]
    if not named:
        return {"": words}
    if part == "train":
        raise DatasetError(f"{' '.join(each)}: only --valid-data-path and --test-data-path take names; leave them out")
    if len(named) < len(each):
        raise DatasetError(f"{' '.join(each)}: give every data set a name, as in web=data/a, or none")
    repeated = next((name for i, (name, _) in enumerate(named) if name in dict(named[:i])), None)
    if repeated:
        raise DatasetError(f"two data sets have the name {repeated}; give each another name")
    return dict(named)


def corpus_names(paths: Paths) -> list[str]:
    """Return a short name of each corpus of `prefixes_of`, or its prefix if two corpora would have the same name."""
    prefixes = prefixes_of(paths)
    short = [re.sub(r"_text_document(_train|_valid|_test)?$", "", Path(prefix).name) for prefix in prefixes]
    return [name if short.count(name) == 1 else prefix for name, prefix in zip(short, prefixes, strict=True)]


class OfCorpus(WrappedDataset):
    """Data set of one of several corpora. Its samples also have "corpus", the number of the corpus, int64 scalar."""

    def __init__(self, dataset: Any, number: int) -> None:
        super().__init__(dataset)
        self._number = torch.tensor(number)

    def __getitem__(self, n: int) -> dict[str, Any]:
        return {**self.dataset[n], "corpus": self._number}


def build_datasets(open_: Open, paths: Paths, split: str) -> tuple[tuple[Any, Any, Any], list[str]]:
    """Return ((training, validation, test) datasets, notes on empty datasets); an empty dataset is None.

    Validation and test may have several named data sets (see `sets_of`), which are returned as a dict. If there are
    several corpora, each sample has the number of its corpus (see `OfCorpus`).

    paths: corpora whose documents `split` divides into the three datasets, or a mapping from `train`, `valid` and
    `test` to corpora of which all documents are used. Training corpora may be in stages.
    open_: opens the corpus of a prefix and returns (number of documents, dataset factory). The factory must raise
    ValueError if the documents do not fill a sample.
    Raises DatasetError if the training dataset is empty.
    """
    notes: list[str] = []
    # part -> name of the data set, "" without names -> (weight, data set of a corpus)
    found: dict[str, dict[str, list[tuple[str | None, Any]]]] = {part: {} for part in PARTS}
    prefixes = prefixes_of(paths)
    trained: dict[str, Any] = {}  # prefix -> training data set

    def add(part: str, name: str, weight: str | None, prefix: str, make: Make, chosen: range, total: int) -> None:
        try:
            dataset = make(chosen, part)
            if isinstance(dataset, CorpusDataset):
                dataset.prefix = prefix
            if len(prefixes) > 1:
                dataset = OfCorpus(dataset, prefixes.index(prefix))
            found[part].setdefault(name, []).append((weight, dataset))
            if part == "train":
                trained[prefix] = dataset
        except DatasetError:
            raise
        except ValueError as error:
            where = f"the {part} part of {prefix} ({len(chosen)} of {total} documents)"
            if part == "train":
                raise DatasetError(f"{where}: {error}") from None
            notes.append(f"{where} is empty: {error}")

    shares = dict(zip(PARTS, parse_split(split), strict=True))
    for use in _uses(paths):
        total, make = open_(use.prefix)
        ranges = split_documents(list(shares.values()), total) if use.is_split else [range(total)] * len(PARTS)
        for part, chosen in zip(PARTS, ranges, strict=True):
            if part in use.parts and (shares[part] or not use.is_split):
                add(part, use.name, use.weight, use.prefix, make, chosen, total)
    if not found["train"]:
        raise DatasetError(
            "there is no training data; "
            + (f"change --split {split}" if not isinstance(paths, Mapping) else "set --train-data-path")
        )
    train, valid, test = (_sets(found[part]) for part in PARTS)
    stages = _stages(paths)
    return (_in_stages(trained, stages) if stages else train, valid, test), notes


class _Use(NamedTuple):
    """A corpus that a run uses.

    parts: the parts of the run that read it. name: name of the data set to which it belongs, or "".
    is_split: whether --split divides its documents.
    """

    parts: Sequence[str]
    name: str
    weight: str | None
    prefix: str
    is_split: bool


def _uses(paths: Paths) -> Iterator[_Use]:
    for prefix in prefixes_in(_stages(paths)):
        yield _Use(("train",), "", None, prefix, isinstance(paths, Staged))
    if isinstance(paths, Staged):
        for weight, prefix in parse_blend(paths.held_out or ()):
            yield _Use(PARTS[1:], "", weight, prefix, True)
    elif isinstance(paths, Mapping):
        for part in PARTS:
            words = paths.get(part, ())
            for name, blend in sets_of(() if isinstance(words, Staged) else words, part).items():
                for weight, prefix in parse_blend(blend):
                    yield _Use((part,), name, weight, prefix, False)
    else:
        for weight, prefix in parse_blend(paths):
            yield _Use(PARTS, "", weight, prefix, True)


def _stages(paths: Paths) -> tuple[Stage, ...]:
    words = paths.get("train") if isinstance(paths, Mapping) else paths
    return words.stages if isinstance(words, Staged) else ()


def _in_stages(trained: Mapping[str, Any], stages: Sequence[Stage]) -> StagedDataset:
    """Return the training data set of `stages`. trained: prefix -> data set of a corpus.

    Raises DatasetError if the begin of a stage is not after that of the stage before it.
    """
    datasets = list(trained.values())
    numbers = {prefix: i for i, prefix in enumerate(trained)}
    tokens = tokens_of(datasets[0])
    found = []
    for stage in stages:
        weights = {numbers[prefix]: w or str(trained[prefix].samples_per_epoch) for w, prefix in stage.blend}
        found.append((stage.in_samples(tokens).begin, weights))
    try:
        salts = [[int(look(prefix), 16) for prefix in trained] for look in (content_fingerprint, corpus_fingerprint)]
        return StagedDataset(datasets, found, *salts)
    except ValueError as error:
        raise DatasetError(f"--data-stages: {error}; a sample has {tokens} tokens") from None


def tokens_of(dataset: Any) -> int:
    """Return the number of tokens of a sample: of encoder and decoder for T5, else of one window."""
    plan = getattr(dataset, "plan", None)
    return plan.encoder + plan.decoder if plan is not None else int(dataset.seq_length)


def _sets(found: Mapping[str, list[tuple[str | None, Any]]]) -> Any:
    """Return a data set, a dict from names to data sets if they are named, or None."""
    blends = {name: _blend(members) for name, members in found.items()}
    return blends.get("") or blends or None


def _blend(members: list[tuple[str | None, Any]]) -> Any:
    if len(members) < 2:
        return members[0][1] if members else None
    datasets = [dataset for _, dataset in members]
    weights = [weight or str(dataset.samples_per_epoch) for weight, dataset in members]
    return BlendedDataset(datasets, weights)


def corpus_fingerprint(prefix: str) -> str:
    """Return a hash that identifies the corpus `prefix`.

    The hash covers the size, start and end of each .bin and .idx file of the corpus and of its loss mask, if any.
    """
    digest = hashlib.sha256()
    for path in (place(f"{prefix}{part}{end}") for part in ("", LOSS) for end in (".bin", ".idx")):
        if path.is_file():
            with path.open("rb") as file:
                size = path.stat().st_size
                digest.update(f"{path.suffix} {size} ".encode() + file.read(ENDS))
                file.seek(max(size - ENDS, 0))
                digest.update(file.read(ENDS))
    return digest.hexdigest()[:12]


def content_fingerprint(prefix: str) -> str:
    """Return a hash that identifies the corpus `prefix`, also if only its middle differs from another corpus.

    The hash covers what `corpus_fingerprint` covers, and evenly spaced blocks of each file.
    """
    digest = hashlib.sha256(corpus_fingerprint(prefix).encode())
    for path in (place(f"{prefix}{part}{end}") for part in ("", LOSS) for end in (".bin", ".idx")):
        if path.is_file():
            starts = np.linspace(0, max(path.stat().st_size - SAMPLED, 0), SAMPLES).astype(np.int64).tolist()
            for piece in _pieces(path, sorted(set(starts))):
                digest.update(piece)
    return digest.hexdigest()[:12]


def _pieces(path: Path, starts: Sequence[int]) -> Iterator[bytes]:
    """Yield `SAMPLED` bytes of a file from each start on."""
    if isinstance(path, RemotePath):
        size = path.stat().st_size
        with ThreadPoolExecutor(REQUESTS) as pool:
            yield from pool.map(lambda at: path.read_range(at, min(at + SAMPLED, size)), starts)
        return
    with path.open("rb") as file:
        for at in starts:
            file.seek(at)
            yield file.read(SAMPLED)


def made_with(prefix: str) -> dict[str, Any] | None:
    """Return the metadata in `prefix`.json, which tools/preprocess_data.py writes, or None without this file.

    Raises ValueError if the file is damaged.
    """
    path = place(f"{prefix}.json")
    if not path.is_file():
        return None
    try:
        about: dict[str, Any] = read_json(path, dict)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged ({error}); copy it again or rebuild the corpus with tools/preprocess_data.py"
        ) from None
    return about
