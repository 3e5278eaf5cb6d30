"""The loss of a unigram model on the validation data, as a baseline for the loss of a trained model.

The unigram model takes token frequencies from the training data, with add-one smoothing.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.config import Config
from megatron.data.corpus_paths import parse_blend
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.splits import parse_split, split_documents

MAX_COUNTED_TOKENS = 20_000_000  # from each split, at most this many tokens are counted
SENTINEL_SAMPLES = 2000  # number of samples used to estimate the share of sentinels in T5's targets
Counts = NDArray[np.int64]


class TargetEntropies(NamedTuple):
    """Unigram losses of a T5 in nats per token.

    targets: loss over all target tokens. text: loss over the target tokens except sentinels and end tokens.
    """

    targets: float
    text: float


def count_tokens(config: Config, vocab_size: int) -> tuple[Counts, Counts] | None:
    """Return (counts [vocab_size] of tokens in the training data, the same for the validation data).

    Returns None unless the run has exactly one corpus.
    """
    corpora = parse_blend(config.data.data_path or [])
    if len(corpora) != 1:
        return None
    _, prefix = corpora[0]  # its weight does not matter
    if not Path(f"{prefix}.idx").is_file():
        return None
    indexed = IndexedDataset(prefix)
    train, valid, _ = split_documents(parse_split(config.data.split), indexed.num_documents)
    # Document i has the tokens boundaries[i] to boundaries[i + 1] - 1.
    boundaries = np.concatenate([[0], indexed.document_ends()])

    def counts(part: range) -> Counts:
        # The tokens of the part's documents, which are contiguous.
        tokens = indexed.tokens[boundaries[part.start] : boundaries[part.stop]][:MAX_COUNTED_TOKENS]
        found = np.bincount(tokens, minlength=vocab_size)
        if len(found) > vocab_size > 0:
            raise ValueError(f"{prefix} has larger token ids than the run's vocabulary, so it is another corpus")
        return found

    return counts(train), counts(valid)


def text_entropy(config: Config) -> float | None:
    """Return the unigram loss of the validation text in nats per token.

    Returns None if the run has no validation text or does not have exactly one corpus.
    """
    counts = count_tokens(config, config.model.vocab_size or 0)
    if counts is None:
        return None
    train, valid_counts = counts
    if not valid_counts.sum():
        return None
    # Add-one smoothing, so that no token has the probability 0.
    smoothed = train + 1
    return _cross_entropy(valid_counts, smoothed / smoothed.sum())


def target_entropies(config: Config, samples: int) -> TargetEntropies | None:
    """Return unigram losses over the first `samples` validation samples of a T5.

    Returns None without validation samples, with several corpora, or if preprocessing has masked the corpus.
    """
    from megatron.tasks import T5  # importing torch is slow, so other reports avoid it
    from megatron.tokenizer import load_tokenizer

    tokenizer = T5().extended(config, load_tokenizer(config.data.vocab_file or "", config.data.tokenizer_type))
    counts = count_tokens(config, tokenizer.vocab_size)
    if counts is None:
        return None
    text_counts, _ = counts  # of the training text, without sentinels
    (train_dataset, valid_dataset, _), _ = T5().datasets(config, tokenizer)
    if train_dataset is None or valid_dataset is None:
        return None
    # A token is either text or a mark: a sentinel, an end token or padding.
    is_text = np.ones(tokenizer.vocab_size, dtype=bool)
    is_text[[tokenizer.eod, tokenizer.pad, *tokenizer.sentinels]] = False
    # The probabilities of the text tokens; their sum is 1. The + 1 is the add-one smoothing.
    smoothed = np.where(is_text, text_counts + 1, 0)
    text_probabilities = smoothed / smoothed.sum()
    # In targets, the probability of a mark is its frequency in the targets of training samples. Text shares the
    # remaining probability.
    train_counts = _count_labels(train_dataset, SENTINEL_SAMPLES, tokenizer.vocab_size)
    valid_counts = _count_labels(valid_dataset, samples, tokenizer.vocab_size)
    mark_probabilities = (train_counts + 1)[~is_text] / (train_counts.sum() + (~is_text).sum())
    probabilities = text_probabilities * (1 - mark_probabilities.sum())
    probabilities[~is_text] = mark_probabilities
    return TargetEntropies(
        targets=_cross_entropy(valid_counts, probabilities),
        text=_cross_entropy(valid_counts[is_text], text_probabilities[is_text]),
    )


def _count_labels(dataset: Any, num_samples: int, num_labels: int) -> Counts:
    """Return how often each label, [num_labels], counts in the loss of the first samples."""
    counts = np.zeros(num_labels, dtype=np.int64)
    for index in range(num_samples):
        sample = dataset[index]
        # Only labels with a loss mask above 0 count in the loss.
        scored = sample["labels"][sample["loss_mask"] > 0].numpy()
        counts += np.bincount(scored, minlength=num_labels)
    return counts


def _cross_entropy(counts: Counts, probabilities: NDArray[np.float64]) -> float:
    """Return the mean of -log(probability) over the counted labels, in nats."""
    return float(-(counts * np.log(probabilities)).sum() / max(counts.sum(), 1))
