"""Checks of the data: files present and intact, matching tokenizer, enough tokens."""

from typing import Any

from megatron.config import Config

from .finding import Findings, failed, ok, warning

MAX_SAMPLED_TOKENS = 1 << 24  # at most this many tokens of a corpus are compared with the vocabulary size
SAMPLE_SLICES = 64


def check_corpora(config: Config, tokenizer: Any, quick: bool) -> Findings:
    """Check each corpus that the settings name.

    tokenizer: the run's tokenizer, None if it could not be loaded. quick: skip the checks that read the whole corpus.
    """
    from megatron.data.corpus_paths import TRIPLE_PARTS, is_triple, prefixes_of, whole_of
    from megatron.data.cpm_triples import check_settings
    from megatron.data.fingerprints import made_with
    from megatron.data.indexed_dataset import IndexedDataset

    try:
        prefixes = prefixes_of(config.data.paths)
    except ValueError as error:
        yield failed("data", str(error), "correct the flag, or make a corpus with tools/preprocess_data.py")
        return
    # A T5 reads corpora whose spans were masked during preprocessing, as three pairs each.
    are_masked = config.is_t5 and all(map(is_triple, prefixes))
    for prefix in prefixes:
        pairs = [f"{prefix}_{part}" for part in TRIPLE_PARTS] if are_masked else [prefix]
        try:
            datasets = list(map(IndexedDataset, pairs))
        except (ValueError, OSError) as error:
            yield failed(
                "data",
                str(error),
                "make the corpus again with tools/preprocess_data.py, or copy its .bin and .idx files again",
            )
            continue
        if whole := whole_of(prefix):
            yield failed("data", f"{prefix} is only a part of the corpus {whole}", f"name {whole} instead")
        for pair, dataset in zip(pairs, datasets, strict=True):
            yield ok("data", f"{pair}: {dataset.num_documents} documents, {dataset.num_tokens} tokens")
        # Ids of sentinels follow the vocabulary, in any number, so ids of masked corpora have no limit.
        dataset_of_ids = None if are_masked else datasets[0]
        try:
            sidecar = made_with(prefix)
            if are_masked:
                check_settings(prefix, config)
        except ValueError as error:
            yield failed("data", str(error), "see the message")
            continue
        yield from _check_tokenizer(prefix, sidecar, dataset_of_ids, config, tokenizer)
        if not are_masked:
            yield from _check_tokens(prefix, datasets[0], config)
        if not quick:
            yield from _check_content(prefix)


def _check_content(prefix: str) -> Findings:
    """Compare a corpus with the checksums in its sidecar and look for holes."""
    from megatron.data.damage import find_problems

    try:
        problem = next(find_problems(prefix), None)
    except ValueError as error:
        problem = str(error)
    if problem:
        yield failed("content of the data", problem, "copy the files of the corpus again")
    else:
        yield ok("content of the data", f"{prefix}: no damage and no holes")


def _check_tokenizer(prefix: str, sidecar: Any, dataset: Any, config: Config, tokenizer: Any) -> Findings:
    """Check that the corpus was made with the run's tokenizer and fits its vocabulary and the run's settings.

    sidecar: content of its sidecar, None without one. dataset: the corpus, None if its ids are not compared with the
    vocabulary.
    """
    from megatron.data.document_ends import REMEDY, missing_ends
    from megatron.tokenizer.base import eod_mismatch
    from megatron.training.inputs import note_on_objective

    if tokenizer is not None and sidecar is not None:
        corpus_fingerprint = sidecar.get("fingerprint")
        remedy = "pass the tokenizer of the corpus, or preprocess the text again"
        if corpus_fingerprint != tokenizer.fingerprint:
            yield failed(
                "tokenizer of the data",
                f"{prefix}.bin was made with a tokenizer of SHA-256 {str(corpus_fingerprint)[:12]}, but "
                f"{config.data.vocab_file} has SHA-256 {tokenizer.fingerprint[:12]}",
                remedy,
            )
            return
        end_difference = eod_mismatch(sidecar, tokenizer, config.data.vocab_file)
        if end_difference:
            yield failed("tokenizer of the data", f"{prefix}.bin {end_difference}", remedy)
            return
        yield ok("tokenizer of the data", f"SHA-256 {tokenizer.fingerprint[:12]}")
    if sidecar is not None:
        if problem := missing_ends(sidecar, config):
            yield failed("ends of documents", f"{prefix}.bin {problem}", REMEDY)
        if note := note_on_objective(sidecar, config):
            yield warning("objective of the data", f"{prefix}.bin {note}", "pass --objective sft")
    # A corpus of other programs has no sidecar, so only its ids show whether it fits the vocabulary.
    size = vocabulary_size(config, tokenizer)
    if size is None or dataset is None:
        return
    largest = largest_id(dataset)
    if largest >= size:
        yield failed(
            "ids",
            f"{prefix}.bin contains the token id {largest}, but the largest id of the vocabulary is {size - 1}",
            "set --vocab-file to the tokenizer with which the corpus was made",
        )
    else:
        yield ok("ids", f"the largest id is {largest}, the vocabulary has {size} ids")


def vocabulary_size(config: Config, tokenizer: Any) -> int | None:
    """Return the size of a run's vocabulary, None if neither the settings nor a tokenizer gives it."""
    if config.model.vocab_size:
        return config.model.vocab_size
    return None if tokenizer is None else int(tokenizer.vocab_size)


def largest_id(dataset: Any) -> int:
    """Return the largest token id in a corpus, or -1 if the corpus is empty.

    In a corpus of more than MAX_SAMPLED_TOKENS tokens, only a sample of MAX_SAMPLED_TOKENS tokens is searched.
    """
    import numpy as np

    num_tokens = dataset.num_tokens
    if not num_tokens:
        return -1
    tokens = dataset.tokens  # only slices of a corpus in object storage can be read
    if num_tokens <= MAX_SAMPLED_TOKENS:
        return int(tokens[:num_tokens].max())
    length = MAX_SAMPLED_TOKENS // SAMPLE_SLICES
    # The slices of the sample are spread evenly over the corpus.
    starts = np.linspace(0, num_tokens - length, SAMPLE_SLICES).astype(np.int64)
    return max(int(tokens[start : start + length].max()) for start in starts)


def _check_tokens(prefix: str, dataset: Any, config: Config) -> Findings:
    """Check that the training, validation and test split each have enough tokens for one sample."""
    from megatron.data.splits import PARTS, parse_split, split_documents

    # Only these objectives cut their samples, of --seq-length tokens and one more, from all tokens of a split.
    if not config.data.data_path or config.is_t5 or config.objective not in ("lm", "prefix-lm"):
        return
    needed = config.data.seq_length + 1
    counts = {}  # name of a split -> number of its tokens
    shares = parse_split(config.data.split)
    documents_of_parts = split_documents(shares, dataset.num_documents)
    for part, share, documents in zip(PARTS, shares, documents_of_parts, strict=True):
        # A split with a share of 0 is meant to be empty.
        if share:
            counts[part] = int(dataset.document_sizes(documents).sum())
    sizes = ", ".join(f"{part} {tokens}" for part, tokens in counts.items())
    remedy = f"use more text, a smaller --seq-length, or another --split than {config.data.split}"
    # Training needs tokens even if its share is 0, in which case `counts` lacks it.
    if counts.get("train", 0) < needed:
        yield failed("tokens", f"{prefix} has too few tokens for training ({sizes}); a sample needs {needed}", remedy)
    elif min(counts.values()) < needed:
        yield warning(
            "tokens",
            f"{prefix} has too few tokens in some splits ({sizes}): a sample needs {needed}, so these splits are empty",
            remedy,
        )
    else:
        yield ok("tokens", sizes)
