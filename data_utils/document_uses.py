"""Commands `when` and `which` of inspect_data.py: uses of a document in a run, and documents of an iteration."""

import argparse
from bisect import bisect_right
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.data.corpus_paths import corpus_names, is_triple, prefixes_of
from megatron.data.indexed_dataset import IndexedDataset

from .iterations import Iterations
from .run_data import load_config, load_datasets
from .tables import align_columns

PREVIEW = 60  # number of characters of a document's text that `which` shows


class Use(NamedTuple):
    """Tokens of a document in a sample of the run.

    sample: number of the sample. positions: their positions in the window of the sample. tokens: their numbers in the
    document. document, corpus: number of the document, and index of its corpus.
    """

    sample: int
    positions: range
    tokens: range
    document: int
    corpus: int


def uses_in_sample(dataset: Any, sample: int) -> Iterator[Use]:
    """Yield the documents of a sample of a training data set, in order."""
    # A data set of one corpus has no `locate`.
    corpus, index = dataset.locate(sample) if hasattr(dataset, "locate") else (0, sample)
    position = 0
    for document, start, stop in corpus_datasets(dataset)[corpus].pieces(index):
        end = position + stop - start
        yield Use(sample, range(position, end), range(start, stop), document, corpus)
        position = end


def uses_of_document(dataset: Any, corpus: int, document: int, samples: int) -> Iterator[Use]:
    """Yield where the first `samples` samples of a training data set contain a document, in the order of samples."""
    member = corpus_datasets(dataset)[corpus]
    consumed = _num_consumed(dataset, corpus, samples)
    epochs = -(-consumed // member.samples_per_epoch)  # rounded up, as the last epoch may be incomplete
    sample_numbers: set[int] = set()
    for epoch in range(epochs):
        # `index` is a sample's number in its corpus, counted on over the epochs: the first one of epoch 1 has the
        # number samples_per_epoch.
        for index in member.containing(np.array([document]), epoch).tolist():
            # The smallest n for which more than `index` of the first n samples come from the corpus: with index 2, the
            # n at which there are 3. The last of these n samples is the one that reads place `index` of the corpus.
            n = bisect_right(range(samples + 1), index, key=partial(_num_consumed, dataset, corpus))
            if n <= samples:
                sample_numbers.add(n - 1)
    for sample in sorted(sample_numbers):
        for use in uses_in_sample(dataset, sample):
            if use.document == document:
                yield use


def _num_consumed(dataset: Any, corpus: int, samples: int) -> int:
    """Return how many of the first `samples` samples come from a corpus."""
    return int(dataset.consumed_per_corpus(samples)[corpus]) if hasattr(dataset, "consumed_per_corpus") else samples


def corpus_datasets(dataset: Any) -> list[Any]:
    """Return the data sets of a training data set's corpora."""
    return list(getattr(dataset, "datasets", [dataset]))


def print_uses(args: argparse.Namespace) -> None:
    """Run the command `when`: print the iterations, samples and positions at which a run trains on a document."""
    config = load_config(args.run_dir)
    _, (dataset, *_) = load_datasets(config)  # the training data set
    members = corpus_datasets(dataset)
    trained = list(dict.fromkeys(member.prefix for member in members))
    path = args.path or ""
    # The only corpus needs no --path.
    if not path and len(trained) == 1:
        path = trained[0]
    paths = config.data.paths
    short_names = dict(zip(prefixes_of(paths), corpus_names(paths), strict=True))
    matching = []  # indices of the data sets of this corpus
    for index, member in enumerate(members):
        if path in (member.prefix, short_names.get(member.prefix)):
            matching.append(index)
    if not matching:
        raise ValueError(
            f"--path {path!r} names no corpus of the training data of {args.run_dir}; give one of {', '.join(trained)}"
        )
    first_match = members[matching[0]]
    prefix = first_match.prefix
    used = first_match.documents
    if args.document not in used:
        raise ValueError(
            f"document {args.document} of {prefix} is not a training document of {args.run_dir}; "
            f"these are {used.start} to {used.stop - 1}"
        )
    iterations = Iterations(config, Path(args.run_dir))
    rows = []
    num_done = 0
    for corpus in matching:
        for use in uses_of_document(dataset, corpus, args.document, iterations.total):
            iteration = iterations.of_sample(use.sample)
            state = _iteration_state(iteration, iterations)
            num_done += state == "done"  # True counts as 1
            positions = _format_range(use.positions)
            rows.append((iteration, state, use.sample, positions, _format_range(use.tokens)))
    header = ("iteration", "state", "sample", "positions", "tokens of the document")
    print(align_columns([header, *rows]))
    print(
        f"document {args.document} of {prefix}: {len(rows)} samples contain it, {num_done} of them up to "
        f"iteration {iterations.logged}, the last logged; the run has {config.train.train_iters} iterations"
    )


def _iteration_state(iteration: int, iterations: Iterations) -> str:
    if iterations.is_skipped(iteration):
        return "skipped"
    return "done" if iteration <= iterations.logged else "to come"


def print_iteration(args: argparse.Namespace) -> None:
    """Run the command `which`: print the documents on which an iteration of a run trains, with their text."""
    config = load_config(args.run_dir)
    if not 1 <= args.iteration <= config.train.train_iters:
        raise ValueError(f"{args.run_dir} has iterations 1 to {config.train.train_iters}, but no {args.iteration}")
    tokenizer, (dataset, *_) = load_datasets(config)
    iterations = Iterations(config, Path(args.run_dir))
    prefixes = [member.prefix for member in corpus_datasets(dataset)]
    corpora = []
    for prefix in prefixes:
        # A corpus that was masked for T5 during preprocessing (CPM's way) is three pairs, of which PREFIX_context holds
        # the masked texts.
        is_masked = config.is_t5 and is_triple(prefix)
        corpora.append(IndexedDataset(f"{prefix}_context" if is_masked else prefix))
    rows = []
    for n in iterations.samples(args.iteration):
        for use in uses_in_sample(dataset, n):
            corpus = corpora[use.corpus]
            # `use.tokens` counts from the first token of the document, the file from the first of all documents.
            begin = corpus.document_start(use.document)
            ids = corpus.tokens[begin + use.tokens.start : begin + use.tokens.stop]
            text = " ".join(tokenizer.decode(ids.tolist()).split())  # on one line
            if len(text) > PREVIEW and not args.full:
                text = text[:PREVIEW] + "..."
            positions = _format_range(use.positions)
            rows.append((n, prefixes[use.corpus], use.document, positions, _format_range(use.tokens), text))
    if iterations.is_skipped(args.iteration):
        print(f"a --skip-* flag skips iteration {args.iteration}")
    header = ("sample", "corpus", "document", "positions", "tokens of the document", "text")
    print(align_columns([header, *rows]))


def _format_range(numbers: range) -> str:
    return f"{numbers.start} to {numbers.stop - 1}"
