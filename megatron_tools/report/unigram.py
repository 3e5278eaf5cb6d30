"""The loss of a unigram model on the validation data, as a baseline for the loss of a trained model.

The unigram model takes token frequencies from the training data, with add-one smoothing.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.config import Config
from megatron.data.corpora import parse_blend
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.splits import parse_split, split_documents

AT_MOST = 20_000_000  # from each split, at most this many tokens are counted
SHOWN = 2000  # number of samples used to estimate the share of sentinels in T5's targets
Counts = NDArray[np.int64]


class OfTargets(NamedTuple):
    """Unigram losses of a T5 in nats per token.

    targets: loss over all target tokens. text: loss over the target tokens except sentinels and end tokens.
    """

    targets: float
    text: float


def counted(data_path: list[str] | None, split: str, vocab_size: int) -> tuple[Counts, Counts] | None:
    """Return (counts [vocab_size] of tokens in the training data, the same for the validation data).

    Returns None unless the run has exactly one corpus.
    """
    corpora = parse_blend(data_path or [])
    if len(corpora) != 1 or not Path(f"{corpora[0][1]}.idx").is_file():
        return None
    indexed = IndexedDataset(corpora[0][1])
    train, valid, _ = split_documents(parse_split(split), indexed.num_documents)
    ends = np.concatenate([[0], indexed.document_ends()])

    def counts(part: range) -> Counts:
        tokens = indexed.tokens[ends[part.start] : ends[part.stop]][:AT_MOST]
        return np.bincount(tokens, minlength=vocab_size)

    return counts(train), counts(valid)


def of_text(config: dict[str, Any]) -> float | None:
    """Return the unigram loss of the validation text in nats per token.

    Returns None if the run has no validation text or does not have exactly one corpus. config: settings of the run.
    """
    counts = counted(config["data"]["data_path"], config["data"]["split"], config["model"]["vocab_size"])
    if counts is None:
        return None
    train, asked = counts
    if not asked.sum():
        return None
    seen = train + 1
    nats = -np.log(seen / seen.sum())
    return float((asked * nats).sum() / asked.sum())


def of_targets(config: Config, samples: int) -> OfTargets | None:
    """Return unigram losses over the first `samples` validation samples of a T5.

    Returns None without validation samples, with several corpora, or if preprocessing has masked the corpus.
    """
    from megatron.tasks import T5  # importing torch is slow, so other reports avoid it
    from megatron.tokenizer import load_tokenizer

    tokenizer = T5().extended(config, load_tokenizer(config.data.vocab_file or "", config.data.tokenizer_type))
    counts = counted(list(config.data.data_path or []), config.data.split, tokenizer.vocab_size)
    if counts is None:
        return None
    (train, valid, _), _ = T5().datasets(config, tokenizer)
    if train is None or valid is None:
        return None

    def labels(dataset: Any, count: int) -> Counts:
        found = np.zeros(tokenizer.vocab_size, dtype=np.int64)
        for n in range(count):
            sample = dataset[n]
            chosen = sample["labels"][sample["loss_mask"] > 0].numpy()
            found += np.bincount(chosen, minlength=len(found))
        return found

    text = np.ones(tokenizer.vocab_size, dtype=bool)
    text[[tokenizer.eod, tokenizer.pad, *tokenizer.sentinels]] = False
    frequencies = np.zeros(tokenizer.vocab_size)
    frequencies[text] = (counts[0] + 1)[text]
    frequencies[text] /= frequencies[text].sum()
    # The probability of sentinels and end tokens is their frequency in the targets of training samples. The other
    # tokens share the remaining probability in proportion to their frequency in the training text.
    shown = labels(train, SHOWN)
    asked = labels(valid, samples)
    marks = (shown + 1)[~text] / (shown.sum() + (~text).sum())
    over_all = np.where(text, frequencies * (1 - marks.sum()), 0.0)
    over_all[~text] = marks

    def nats(asked: Counts, probabilities: NDArray[np.float64]) -> float:
        return float(-(asked * np.log(probabilities)).sum() / max(asked.sum(), 1))

    return OfTargets(nats(asked, over_all), nats(asked[text], frequencies[text]))
