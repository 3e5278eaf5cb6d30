"""Corpora for T5 that are masked during preprocessing, in the format of CPM-2: three `.bin/.idx` pairs.

    PREFIX_context        a document with sentinel V + j in place of its span j (V: size of the text vocabulary)
    PREFIX_target         the spans of the document, each after its sentinel: V + 0, tokens, V + 1, tokens, ...
    PREFIX_target_offset  for each span: position of its sentinel in the target, length including the sentinel

Every document ends with a masked span. The last token of this span is the only end-of-document token.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..config import Config
from .corpora import DatasetFactory, build_datasets
from .corpus_paths import TRIPLE_PARTS, Paths, prefixes_of
from .indexed_dataset import DatasetError, IndexedDataset
from .sample_order import SampleOrder
from .spans import SpanPlan
from .t5_dataset import Datasets, Specials, T5Samples

Ids = NDArray[np.int64]


class CPMTripleDataset(T5Samples):
    """Dataset of T5 samples (see `T5Samples`): the contexts are concatenated and cut into windows of encoder length.

    A sample ends before the first span that does not fit into the decoder or for which no sentinel is left. The
    remaining positions of encoder and decoder are padding. So no span is truncated.
    """

    def __init__(
        self, prefix: str, documents: range, encoder: int, decoder: int, specials: Specials, text_vocab_size: int,
        seed: int, part: str,
    ) -> None:  # fmt: skip
        self.parts = {name: IndexedDataset(f"{prefix}_{name}") for name in TRIPLE_PARTS}
        counts = {name: each.num_documents for name, each in self.parts.items()}
        if len(set(counts.values())) > 1:
            raise DatasetError(f"the pairs of {prefix} do not match: they contain {counts} documents; preprocess again")
        self.specials = specials
        self.first_id = text_vocab_size
        self.documents = documents
        # A window has as many tokens as the encoder. Preprocessing has chosen the spans, so none are drawn.
        self.plan = SpanPlan(encoder, noise=0, spans=0, encoder=encoder, decoder=decoder)
        self.starts = {}
        for name, each in self.parts.items():
            self.starts[name] = np.concatenate([[0], each.document_ends()])
        contexts = self.parts["context"]
        sizes = partial(contexts.document_sizes, documents)
        self.order = SampleOrder(sizes, encoder, seed, part, overlap=0, folder=contexts.orders_folder)
        self._check_sentinels(prefix)

    def _check_sentinels(self, prefix: str) -> None:
        """Raise DatasetError if the sentinels of the first document do not begin at the size of the vocabulary."""
        context = self._document_part("context", self.documents.start)
        found_sentinels = context[context >= self.first_id]
        num_spans = len(self._document_part("target_offset", self.documents.start)) // 2  # 2 numbers for each span
        # A document with 3 spans may have the sentinels V, V + 1 and V + 2, or only the first ones, but no fourth one.
        # It must have one: if none is found, V is expected, so that the check fails.
        num_expected = min(num_spans, max(len(found_sentinels), 1))
        if not np.array_equal(found_sentinels, self.first_id + np.arange(num_expected)):
            raise DatasetError(
                f"{prefix}_context was masked with another tokenizer: its sentinels do not begin at {self.first_id}, "
                f"the size of this tokenizer; pass the tokenizer of the corpus or preprocess again"
            )

    def _document_part(self, name: str, document: int) -> Ids:
        """Return the tokens of one document in one of the three pairs."""
        begin, end = self.starts[name][document : document + 2]
        return self.parts[name].tokens[begin:end].astype(np.int64)

    def _read_window(self, n: int) -> Iterator[tuple[int, int, Ids | None]]:
        """Yield (number of its document in the sample, from 1, token, None) for each context token of window n.

        For a sentinel, the third value is the tokens of the span that it replaces.
        """
        for part in self.parts.values():
            part.check_not_shrunk()  # reading what has been cut off would kill the process
        pieces = self.pieces(n)
        # From time to time, a corpus in object storage releases the files that its cache has deleted.
        self.refresh_after(len(pieces), self.parts.values())
        for number, (document, start, end) in enumerate(pieces, 1):
            target_tokens = self._document_part("target", document)
            offsets = self._document_part("target_offset", document).reshape(-1, 2)
            for token in self._document_part("context", document)[start:end].tolist():
                span = None
                # A token from first_id on is a sentinel: first_id + j replaces span j, which row j of `offsets` locates
                # in the target. With the rows (0, 3) and (3, 2), span 1 is the target tokens 3 and 4.
                if token >= self.first_id:
                    begin, length = offsets[token - self.first_id].tolist()
                    span = target_tokens[begin : begin + length]
                    if len(span) and span[0] >= self.first_id:  # the target repeats the sentinel before the span
                        span = span[1:]
                yield number, token, span

    def __getitem__(self, n: int) -> dict[str, Tensor]:
        context = list[int]()
        owners = list[int]()  # number of each context token's document in the sample
        decoder_tokens = list[int]()
        decoder_owners = list[int]()
        sentinels = self.specials.sentinels
        num_spans = 0  # spans in the sample so far
        for number, token, span in self._read_window(n):
            if span is not None:
                fits_decoder = len(decoder_tokens) + 1 + len(span) <= self.plan.decoder  # 1 for its sentinel
                has_sentinel = num_spans + 1 < len(sentinels)  # one sentinel is left for the end
                if not (fits_decoder and has_sentinel):
                    break  # the sample ends before this span
                # The corpus numbers the spans of each document from 0, a sample numbers the spans of all its documents.
                token = sentinels[num_spans]
                decoder_tokens += [token, *span.tolist()]
                decoder_owners += [number] * (1 + len(span))
                num_spans += 1
            context.append(token)
            owners.append(number)
        if not decoder_tokens:  # the window contains no span, so the decoder predicts the closing sentinel only
            decoder_tokens = [sentinels[0]]
            decoder_owners = [1]
            num_spans = 1
        closed_targets = [*decoder_tokens, sentinels[num_spans]]
        # The labels are the decoder input, shifted by one token.
        arrays = (context, owners, closed_targets[:-1], closed_targets[1:], decoder_owners)
        return self.pad_sample(*(np.array(values, dtype=np.int64) for values in arrays))


def check_settings(prefix: str, config: Config) -> None:
    """Raise DatasetError for settings with which a T5 cannot read the masked corpus `prefix`."""
    data = config.data
    # The number of targets varies, so it does not give the length of the decoder.
    if config.objective != "span-corruption" or data.span_convention != "cpm" or data.dec_seq_length is None:
        raise DatasetError(
            f"{prefix}_context was masked during preprocessing, in CPM's format: pass --objective span-corruption, "
            "--span-convention cpm and --dec-seq-length"
        )


def build_train_valid_test_datasets(
    data_path: Paths, split: str, enc_seq_length: int, dec_seq_length: int, specials: Specials, seed: int,
    text_vocab_size: int,
) -> tuple[Datasets, list[str]]:  # fmt: skip
    """Return ((training, validation, test) datasets, notes) of corpora that were masked during preprocessing.

    The notes report flags without effect, text that is dropped and datasets that are empty.
    Raises DatasetError if a corpus is damaged.
    """

    def open_triple(prefix: str) -> tuple[int, DatasetFactory]:
        make = lambda documents, part: CPMTripleDataset(  # noqa: E731
            prefix, documents, enc_seq_length, dec_seq_length, specials, text_vocab_size, seed, part
        )
        return IndexedDataset(f"{prefix}_context").num_documents, make

    datasets, notes = build_datasets(open_triple, data_path, split)
    sentinels = len(specials.sentinels) - 1  # without the closing sentinel
    all_notes = ["--noise-density and --mean-span-length have no effect: preprocessing has masked the spans"]
    for prefix in prefixes_of(data_path):
        all_notes.append(_overflow_note(prefix, enc_seq_length, dec_seq_length, sentinels))
    return datasets, [*filter(None, all_notes), *notes]


def _overflow_note(prefix: str, encoder: int, decoder: int, sentinels: int) -> str:
    """Return a warning if an average window needs more decoder tokens or sentinels than there are, else ""."""
    context_tokens, target_tokens, offset_numbers = (
        IndexedDataset(f"{prefix}_{name}").num_tokens for name in TRIPLE_PARTS
    )
    # On average, a window of `encoder` context tokens has encoder / context_tokens of all targets and spans.
    needed_tokens = encoder * target_tokens / max(context_tokens, 1) + 1  # with the closing sentinel
    needed_spans = encoder * offset_numbers / 2 / max(context_tokens, 1)  # a span has 2 numbers in target_offset
    # What is scarcer, decoder tokens or sentinels, decides how much of a window is kept.
    kept_share = min(decoder / needed_tokens, sentinels / max(needed_spans, 1))
    if kept_share >= 1:
        return ""
    return (
        f"{prefix}: about {1 - kept_share:.0%} of the text is dropped, as {encoder} encoder tokens need "
        f"{needed_spans:.0f} sentinels and {needed_tokens:.0f} decoder tokens, but there are {sentinels} sentinels and "
        f"{decoder} decoder tokens; lower --enc-seq-length, or raise --dec-seq-length or --num-sentinels"
    )
