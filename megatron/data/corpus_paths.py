"""The words of --data-path and related flags: blends of corpora, and named validation and test sets."""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..config.data import NAMED_SET, is_corpus, is_number, split_words
from ..config.data_stages import Stage, StagedCorpora, prefixes_in
from ..storage import is_url, to_path
from .indexed_dataset import DTYPES, HEADER, LOSS_SUFFIX, DatasetError
from .splits import PARTS

Words = Sequence[str]
Paths = str | Words | StagedCorpora | Mapping[str, Words | StagedCorpora]
TRIPLE_PARTS = "context", "target", "target_offset"  # endings of a corpus that was masked during preprocessing


def parse_blend(words: str | Words) -> list[tuple[str | None, str]]:
    """Parse `0.7 a 0.3 b`, `a` or `a b` into pairs (weight, prefix).

    Without weights, corpora are sampled in proportion to their size. Raises DatasetError if `words` has another form.
    """
    parts = list[str]()
    if isinstance(words, str):
        words = [words]
    for word in words:
        parts += split_words(word)
    argument = f"--data-path {' '.join(parts)}"
    is_weighted = len(parts) > 1 and is_number(parts[0])
    if not is_weighted:
        # Without a weight in front, a number is the name of a corpus or a misplaced weight.
        for part in parts:
            if is_number(part) and not is_corpus(part):
                raise DatasetError(f"{argument} must be pairs of a weight and a prefix, as in 0.7 a 0.3 b")
        return [(None, part) for part in parts]
    if is_corpus(parts[0]):
        raise DatasetError(
            f"{argument}: {parts[0]} is also a corpus; write ./{parts[0]} for it, or 0{parts[0]} as weight"
        )
    weights = parts[::2]
    prefixes = parts[1::2]
    are_positive = all(is_number(weight) and 0 < float(weight) < math.inf for weight in weights)
    if len(weights) != len(prefixes) or not are_positive:
        raise DatasetError(f"{argument} must be pairs of a positive, finite weight and a prefix, as in 0.7 a 0.3 b")
    return list(zip(weights, prefixes, strict=True))


def _parse_distinct(words: str | Words) -> list[tuple[str | None, str]]:
    """Return `parse_blend(words)`. Raises DatasetError if a corpus occurs twice: each sample would come twice.

    `parse_blend` accepts such a blend because old checkpoints may contain it.
    """
    blend = parse_blend(words)
    seen = set()
    for _, prefix in blend:
        path = prefix if is_url(prefix) else os.path.normpath(prefix)
        if path in seen:
            raise DatasetError(f"the blend names {prefix} twice; name it once, with the sum of its weights")
        seen.add(path)
    return blend


def parse_named_sets(words: str | Words, part: str) -> dict[str, str | Words]:
    """Return name -> blend of the data sets in `web=a "books=0.7 b 0.3 c"`; {"": words} if the words have no names.

    part: "train", "valid" or "test".
    Raises DatasetError if only some words have a name, if two have the same, or if training data have a name.
    """
    parts = [words] if isinstance(words, str) else words
    argument = " ".join(parts)
    blends: dict[str, str | Words] = {}
    unnamed = 0  # number of words without a name
    repeated = None  # first name that occurs twice; reported after the other two mistakes
    for word in parts:
        match = NAMED_SET.match(word)
        if not match or is_corpus(word):  # the prefix of a corpus may contain =
            unnamed += 1
            continue
        name = match[1]
        if name in blends and repeated is None:
            repeated = name
        blends[name] = match[2]
    if not blends:
        return {"": words}
    if part == "train":
        raise DatasetError(f"{argument}: only --valid-data-path and --test-data-path take names; leave them out")
    if unnamed:
        raise DatasetError(f"{argument}: give every data set a name, as in web=data/a, or none")
    if repeated:
        raise DatasetError(f"two data sets have the name {repeated}; give each another name")
    return blends


class CorpusUse(NamedTuple):
    """A corpus that a run uses.

    parts: the parts of the run that read it. name: name of the data set to which it belongs, "" without names.
    weight: its weight in the blend, None without weights. is_split: whether --split divides its documents.
    """

    parts: Words
    name: str
    weight: str | None
    prefix: str
    is_split: bool


def corpus_uses(paths: Paths) -> Iterator[CorpusUse]:
    """Yield each use of a corpus in `paths`, those of the data stages first.

    A mapping has separate corpora for each part, so --split divides none of them. In the other forms, it divides all.
    """
    is_split = not isinstance(paths, Mapping)
    for prefix in prefixes_in(stages_in(paths)):
        # A corpus may have another weight in each stage, so this use has none.
        yield CorpusUse(("train",), "", None, prefix, is_split)
    if isinstance(paths, Mapping):
        for part in PARTS:
            words = paths.get(part, ())
            if isinstance(words, StagedCorpora):  # the corpora of stages are already done
                continue
            for name, blend in parse_named_sets(words, part).items():
                for weight, prefix in _parse_distinct(blend):
                    yield CorpusUse((part,), name, weight, prefix, is_split=False)
    else:
        parts: tuple[str, ...] = PARTS
        if isinstance(paths, StagedCorpora):
            # The stages give the training data, so the corpora of --data-path give only the other two parts.
            parts = ("valid", "test")
            paths = paths.held_out or ()
        for weight, prefix in _parse_distinct(paths):
            yield CorpusUse(parts, "", weight, prefix, is_split)


def stages_in(paths: Paths) -> tuple[Stage, ...]:
    """Return the stages of the training data; none without --data-stages."""
    words = paths.get("train") if isinstance(paths, Mapping) else paths
    return words.stages if isinstance(words, StagedCorpora) else ()


def prefixes_of(paths: Paths) -> list[str]:
    """Return the prefixes of all corpora in `paths`."""
    parts = paths if isinstance(paths, Mapping) else {"train": paths}
    prefixes: dict[str, None] = {}  # a dict keeps the order of first use
    for part, words in parts.items():
        if isinstance(words, StagedCorpora):
            prefixes |= dict.fromkeys(prefixes_in(words.stages))
            words = words.held_out or ()  # these come after the corpora of the stages
        for blend in parse_named_sets(words, part).values():
            for _, prefix in parse_blend(blend):
                prefixes[prefix] = None
    return list(prefixes)


def corpus_names(paths: Paths) -> list[str]:
    """Return a short name of each corpus of `prefixes_of`, or its prefix if two corpora would have the same name."""
    prefixes = prefixes_of(paths)
    short_names = [re.sub(r"_text_document(_train|_valid|_test)?$", "", Path(prefix).name) for prefix in prefixes]
    names = []
    for short, prefix in zip(short_names, prefixes, strict=True):
        is_unique = short_names.count(short) == 1
        names.append(short if is_unique else prefix)
    return names


def is_triple(prefix: str) -> bool:
    """Return True if `prefix` names a corpus that was masked during preprocessing (three `.bin/.idx` pairs).

    Beside an ordinary corpus `prefix`, a lone PREFIX_context is another ordinary corpus.
    """
    if not to_path(f"{prefix}_context.idx").is_file():
        return False
    return to_path(f"{prefix}_target.idx").is_file() or not to_path(f"{prefix}.idx").is_file()


def has_loss_mask(prefix: str) -> bool:
    """Return True if PREFIX_loss is the loss mask of the corpus `prefix`, and no ordinary corpus of this name.

    A loss mask has the dtype uint8, which `best_dtype` gives to no tokens. A damaged index counts as that of a mask.
    A mask whose tokens were deleted remains one: it would count as that of a new corpus `prefix`.
    """
    path = to_path(f"{prefix}{LOSS_SUFFIX}.idx")
    if not path.is_file():
        return False
    with path.open("rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size:  # a damaged index
        return True
    _, _, dtype_code, _, _ = HEADER.unpack(header)
    # A code without a dtype is also damage, so it counts as the code of uint8.
    return DTYPES.get(dtype_code, np.uint8) is np.uint8


def whole_of(prefix: str) -> str | None:
    """Return the corpus if `prefix` names its loss mask, or one of the three pairs of a masked corpus, else None."""
    whole = prefix.removesuffix(LOSS_SUFFIX)
    if whole != prefix and has_loss_mask(whole):
        return whole
    for part in TRIPLE_PARTS:
        whole = prefix.removesuffix(f"_{part}")
        if whole != prefix and all(to_path(f"{whole}_{each}.idx").is_file() for each in TRIPLE_PARTS):
            return whole
    return None
