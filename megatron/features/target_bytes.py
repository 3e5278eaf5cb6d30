"""Bytes of text of the targets of a data set, counted by rank 0 in the first samples."""

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ..data.splits import PARTS
from ..seeds import keep_random_state
from ..tokenizer import Tokenizer
from ..training.inputs import corpora_of_run
from ..training.run_state import Run
from .corpus_losses import configured_corpora

CORPUS_KEY = "corpus"  # key of the number of a sample's corpus, see `NumberedCorpus`
MAX_SAMPLES = 1_000  # All of up to this many samples are counted.
# If there are more samples, counting ends after this many targets.
MAX_TARGETS = 200_000
MAX_TARGETS_OF_CORPUS = 20_000  # if a corpus is counted alone

Counts = defaultdict[str, list[int]]  # name -> [bytes, targets]


def bytes_per_target(run: Run, part: str, samples: range) -> dict[str, float]:
    """Return {name: mean bytes of a target}: "" for all of `part`, and each name of a data set or corpus.

    part: `train`, `valid` or `test`.
    samples: numbers of the samples of each data set; of more than MAX_SAMPLES, the first ones are counted.
    The result is empty if there is no such data set, or if its samples have a form that is not known.
    """
    dataset = run.datasets[PARTS.index(part)] if part in PARTS else None
    if dataset is None:
        return {}
    corpora = configured_corpora(run.config)
    # A single data set has no name; its samples may name their corpora.
    named = dataset if isinstance(dataset, Mapping) else {None: dataset}
    counts: Counts = defaultdict(lambda: [0, 0])
    max_targets = MAX_TARGETS if len(samples) > MAX_SAMPLES else sys.maxsize
    with keep_random_state(run.device):
        for name, each in named.items():
            _count_samples(_samples(each, samples), name, corpora, run, counts, max_targets)
    return {name: size / targets for name, (size, targets) in counts.items() if targets}


def corpus_bytes_per_target(run: Run, part: str, name: str) -> float | None:
    """Return the mean bytes of a target of one corpus of a blend, counted in the first samples of the corpus itself.

    part: `train`, `valid` or `test`. name: short name of the corpus. None if there is no such corpus or no target.
    """
    dataset = run.datasets[PARTS.index(part)] if part in PARTS else None
    # Prefix of a corpus, such as data/wiki_text_document, -> its short name, such as wiki.
    name_of = dict(zip(corpora_of_run(run.config), configured_corpora(run.config), strict=True))
    counts: Counts = defaultdict(lambda: [0, 0])
    # A blend has data sets, one for each corpus. Another data set has none, and a user's corpus may have no prefix.
    for corpus in getattr(dataset, "datasets", ()):
        prefix = getattr(corpus, "prefix", "")
        if name_of.get(prefix) == name:
            with keep_random_state(run.device):
                samples = _samples(corpus, range(sys.maxsize))  # `_samples` itself limits their number
                # With a name, the list of corpora, here [], is not read.
                _count_samples(samples, name, [], run, counts, MAX_TARGETS_OF_CORPUS)
    size, targets = counts[name]
    return size / targets if targets else None


def _count_samples(
    samples: Iterator[Mapping[str, Any]],
    name: str | None,
    corpora: list[str],
    run: Run,
    counts: Counts,
    max_targets: int,
) -> None:
    """Add the bytes and targets of each sample to counts[""], and to those of its data set or corpus, if it has a name.

    name: the name of all samples, that of a data set or of a corpus. If it is None, a sample of several corpora has the
    number of its corpus, and the list `corpora` has the name at this index.
    max_targets: number of targets after which counting ends.
    """
    seen = 0
    for sample in samples:
        size, targets = bytes_of_targets(sample, run.tokenizer, run.config.data.eod_mask_loss)
        corpus = name
        if corpus is None and CORPUS_KEY in sample:
            corpus = corpora[int(sample[CORPUS_KEY])]
        # A sample counts for the whole data set, "", and for its corpus if it has one: {"", "wiki"} or only {""}.
        for key in {"", corpus or ""}:
            counts[key][0] += size
            counts[key][1] += targets
        seen += targets
        if seen >= max_targets:
            return


def _samples(dataset: Any, samples: range) -> Iterator[Mapping[str, Any]]:
    """Yield the numbered samples of a data set, of more than MAX_SAMPLES the first ones, up to one of an unknown form.

    An endless data set repeats its text after an epoch, so an estimate reads no more samples than its corpora have.
    """
    if len(samples) > MAX_SAMPLES:
        size = 0
        for corpus in getattr(dataset, "datasets", [dataset]):
            size += getattr(corpus, "samples_per_epoch", MAX_SAMPLES)
        samples = samples[: min(size, MAX_SAMPLES)]
    for index in samples:
        try:
            sample = dataset[index]
        except IndexError:
            return
        if not _has_known_form(sample):
            return
        yield sample


def _has_known_form(sample: Any) -> bool:
    """Return whether `bytes_of_targets` accepts a sample; the text of a custom one may be a string, for example."""
    if not isinstance(sample, Mapping):
        return False
    ids = np.asarray(sample.get("labels" if "loss_mask" in sample else "text", 0))
    return ids.ndim == 1 and ids.dtype.kind in "iu"  # of integers


def bytes_of_targets(sample: Mapping[str, Any], tokenizer: Tokenizer, eod_mask_loss: bool = False) -> tuple[int, int]:
    """Return (bytes of UTF-8 of a sample's targets, number of its targets).

    A sample has `labels` and `loss_mask`, with the effect of --eod-mask-loss, or `text`. In a text each token but the
    first is a target, unless it follows an end-of-document token with `eod_mask_loss` or is in a prefix (`prefixes`).
    """
    if "loss_mask" in sample:
        is_target = torch.as_tensor(sample["loss_mask"]) > 0
        ids = torch.as_tensor(sample["labels"])[is_target].tolist()
        return _text_bytes(ids, tokenizer), len(ids)
    text = torch.as_tensor(sample["text"])
    is_target = torch.ones(len(text), dtype=torch.bool)
    if eod_mask_loss:
        is_target[1:] = text[:-1] != tokenizer.eod
    if "prefixes" in sample:
        # The mask has each token but the last. Of the tokens A B C D with the mask 1 1 0, only B is no target, because
        # it and the token before are in the prefix.
        in_prefix = torch.as_tensor(sample["prefixes"]).bool()
        is_target[1:-1] &= ~(in_prefix[:-1] & in_prefix[1:])
    # The first token is decoded, too, as some tokenizers drop a space in front of a text. It is no target.
    ids = text[is_target].tolist()
    return _text_bytes(ids, tokenizer) - _text_bytes(ids[:1], tokenizer), len(ids) - 1


def _text_bytes(ids: list[int], tokenizer: Tokenizer) -> int:
    """Return the bytes of UTF-8 of the text of `ids`, without special tokens."""
    special = {*tokenizer.specials.values(), *getattr(tokenizer, "sentinels", ())}
    text = tokenizer.decode([i for i in ids if i not in special])
    # A character of several tokens may lie partly outside the targets, as at the ends of a T5's spans. Each U+FFFD in
    # its place has 3 bytes, but stands for 1 byte. Byte-level decoders also write one for the first 2 bytes of 3.
    return len(text.encode()) - 2 * text.count("\ufffd")
