"""T5 dataset over a corpus of plain text; spans are masked when a sample is read.

A sample is a window of concatenated documents. The length of the window is chosen so that it fills encoder and decoder.
The corpus, the seed and the sample number determine which tokens are masked. No mask is stored. Sample numbers continue
from epoch to epoch, so each epoch masks different tokens.

    text      A B C D E F G H
    encoder   A B <1> E F <2> H             convention t5 appends an end token
    decoder   <1> C D <2> G                 convention t5: start token before the inputs, end token after the labels
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .corpora import DatasetFactory, build_datasets
from .corpus_dataset import CorpusDataset
from .corpus_paths import Paths, prefixes_of
from .index_check import open_corpus
from .indexed_dataset import IndexedDataset
from .sample_order import Windows
from .short_documents import fit_documents
from .spans import Mask, SpanPlan, draw_spans, draw_spans_to_document_ends, plan_spans, splice

Sample = dict[str, Tensor]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Specials:
    """Ids of special tokens.

    sentinels: ids of the first, second, ... sentinel. eod: end-of-document id; with convention `t5`, also the last id
    of encoder input and labels. eod_mask_loss: whether the label after an end-of-document token counts in no loss.
    """

    eod: int
    pad: int
    sentinels: tuple[int, ...]
    eod_mask_loss: bool = False


@dataclass(frozen=True)
class Objective:
    """Training objective.

    name: `span-corruption` or `prefix-lm`.
    convention: with `t5`, a start token begins the decoder input, and an end token ends encoder input and labels. With
    `cpm`, the first sentinel begins the decoder input, and a closing sentinel ends the labels.
    """

    name: str = "span-corruption"
    convention: str = "t5"
    noise_density: float = 0.15
    mean_span_length: float = 3.0

    def plan(self, encoder: int, decoder: int | None, sentinels: int) -> SpanPlan:
        """Return the numbers of tokens and spans in a sample. Raises DatasetError if there are too few sentinels."""
        has_end_token = self.convention == "t5"
        if self.name == "prefix-lm":
            decoder_length = decoder or max(encoder // 4, 1)
            targets = decoder_length - 1  # the decoder input begins with a start token or sentinel
            # The window fills the encoder, except for its end token (True counts as 1), and the decoder. Its one span
            # is the targets.
            tokens = encoder - has_end_token + targets
            return SpanPlan(tokens, noise=targets, spans=1, encoder=encoder, decoder=decoder_length)
        return plan_spans(encoder, decoder, self.noise_density, self.mean_span_length, sentinels, has_end_token)


class T5Samples(CorpusDataset):
    """Base of T5 datasets; a sample is a dict of int64 tensors of k encoder or q decoder tokens.

    Sample n exists for any n >= 0. encoder, decoder, labels: padded token ids [k], [q], [q].
    encoder_document_ids [k], decoder_document_ids [q]: number of each token's document in the sample, starting at 1;
    0 for padding. With convention `t5`, decoder_document_ids are the ids of the labels: the token before a document's
    first label counts as the start token of this document. loss_mask [q]: 1 where a label counts in the loss, else 0.
    """

    plan: SpanPlan
    specials: Specials

    def pad_sample(
        self, encoder: Ids, encoder_documents: Ids, decoder: Ids, labels: Ids, decoder_documents: Ids
    ) -> Sample:
        """Return the sample, padded to `plan.encoder` encoder tokens and `plan.decoder` decoder tokens.

        encoder_documents: document id of each encoder token. decoder_documents: document id of each decoder token, or
        of its label with convention `t5`.
        """
        encoder_length = self.plan.encoder
        decoder_length = self.plan.decoder

        def pad_to(values: Ids, length: int, filler: int) -> Tensor:
            padded = np.full(length, filler, dtype=np.int64)
            padded[: len(values)] = values
            return torch.from_numpy(padded)

        pad = self.specials.pad
        loss_mask = np.ones(len(labels), dtype=np.int64)
        if self.specials.eod_mask_loss:
            loss_mask[decoder == self.specials.eod] = 0
        return {
            "encoder": pad_to(encoder, encoder_length, pad),
            "decoder": pad_to(decoder, decoder_length, pad),
            "labels": pad_to(labels, decoder_length, pad),
            "encoder_document_ids": pad_to(encoder_documents, encoder_length, 0),
            "decoder_document_ids": pad_to(decoder_documents, decoder_length, 0),
            "loss_mask": pad_to(loss_mask, decoder_length, 0),
        }


class T5Dataset(T5Samples):
    """Dataset that masks spans when a sample is read.

    With convention `cpm`, samples of short documents may be padded; all other samples are full.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: range,
        objective: Objective,
        plan: SpanPlan,
        specials: Specials,
        seed: int,
        part: str,
        text_vocab_size: int | None = None,
    ) -> None:
        self.indexed = indexed
        self.objective = objective
        self.plan = plan
        self.specials = specials
        self.windows = Windows(
            indexed, documents, plan.tokens, seed, f"{part} spans", overlap=0, vocab_size=text_vocab_size
        )
        self.order = self.windows.order
        self.documents = documents
        self.seed = [seed, *part.encode()]
        self.sentinels = np.array(specials.sentinels, dtype=np.int64)

    def window(self, n: int) -> tuple[Ids, Ids]:
        """Return (tokens of window n, document id of each token); document ids start at 1."""
        text, sizes = self.windows.read(n)
        return text, np.repeat(np.arange(1, len(sizes) + 1), sizes)

    def __getitem__(self, n: int) -> Sample:
        text, documents = self.window(int(n))
        length = len(text)
        rng = np.random.Generator(np.random.Philox([*self.seed, int(n)]))
        if self.objective.name == "prefix-lm":
            # The one span is the end of the window. A mask 0 0 1 1 differs from its left neighbours at 0 0 1 0.
            is_masked = np.arange(length) >= length - self.plan.noise
            is_span_start = np.diff(is_masked, prepend=False)
        elif self.objective.convention == "t5":
            is_masked, is_span_start = draw_spans(rng, self.plan)
        else:  # the sample may have fewer tokens than the window
            # A document ends with an end-of-document token. A corpus may have none: then the next document follows.
            is_end = text == self.specials.eod
            is_end[:-1] |= np.diff(documents) > 0
            document, _, stop = self.pieces(n)[-1]  # the last document may end with the window
            size = self.indexed.document_sizes(range(document, document + 1))  # [1]
            is_end[-1:] |= stop == size
            is_masked, is_span_start, length = draw_spans_to_document_ends(rng, self.plan, is_end)
        return self._build_sample(text[:length], documents[:length], is_masked[:length], is_span_start[:length])

    def _build_sample(self, text: Ids, documents: Ids, is_masked: Mask, is_span_start: Mask) -> Sample:
        """Return the sample for a text. The masks mark the tokens in spans and the first tokens of spans."""
        spans = int(is_span_start.sum())
        if self.objective.name == "prefix-lm":
            encoder = text[~is_masked]
            targets = text[is_masked]
            encoder_documents = documents[~is_masked]
            decoder_documents = documents[is_masked]
        else:
            # One sentinel for each span; the next one is left for the end.
            encoder, targets, _ = splice(text, is_masked, is_span_start, self.sentinels[:spans])
            # A sentinel belongs to the document of the span that it replaces.
            encoder_documents = documents[~is_masked | is_span_start]
            # In the decoder, the first token of a span counts twice, as a sentinel precedes it.
            decoder_documents = np.repeat(documents[is_masked], 1 + is_span_start[is_masked])
        if self.objective.convention == "t5":
            # Both texts get an end token, which belongs to the last document.
            eod = self.specials.eod
            decoder = np.append(self.specials.pad, targets)  # T5 uses the padding token as start token
            return self.pad_sample(
                np.append(encoder, eod), np.append(encoder_documents, encoder_documents[-1]),
                decoder, np.append(targets, eod), np.append(decoder_documents, decoder_documents[-1]),
            )  # fmt: skip
        if self.objective.name == "prefix-lm":  # for span corruption, splice() has put a sentinel before each span
            targets = np.append(self.sentinels[0], targets)
            # The sentinel belongs to the document of the first target.
            decoder_documents = np.append(decoder_documents[:1], decoder_documents)
        closed_targets = np.append(targets, self.sentinels[spans])
        # The labels are the decoder input, shifted by one token.
        return self.pad_sample(encoder, encoder_documents, closed_targets[:-1], closed_targets[1:], decoder_documents)


Datasets = tuple[Any, Any, Any]


def build_train_valid_test_datasets(
    data_path: Paths,
    split: str,
    objective: Objective,
    enc_seq_length: int,
    dec_seq_length: int | None,
    specials: Specials,
    seed: int,
    text_vocab_size: int | None = None,
) -> tuple[Datasets, list[str]]:
    """Return ((training, validation, test) datasets, notes) of one or several `.bin/.idx` pairs.

    text_vocab_size: size of the text vocabulary; all ids of a corpus must be smaller.
    The notes report the lengths of a sample and empty datasets.
    Raises DatasetError if a pair is damaged or has ids outside the vocabulary, if the training documents do not fill
    one sample, or if there are too few sentinels.
    """
    plan = objective.plan(enc_seq_length, dec_seq_length, len(specials.sentinels))
    corpora = {prefix: open_corpus(prefix, text_vocab_size) for prefix in prefixes_of(data_path)}
    length_notes = []
    if objective.convention == "cpm" and objective.name == "span-corruption":
        sizes = [indexed.document_sizes(range(indexed.num_documents)) for indexed in corpora.values()]
        share = objective.noise_density
        span = objective.mean_span_length
        plan, short_note = fit_documents(plan, sizes, share, span, dec_seq_length, len(specials.sentinels))
        if short_note:
            length_notes.append(short_note)
    note = f"a sample is {plan.tokens} tokens of text: {plan.encoder} in the encoder, {plan.decoder} in the decoder"

    def open_pair(prefix: str) -> tuple[int, DatasetFactory]:
        indexed = corpora[prefix]
        make = lambda documents, part: T5Dataset(  # noqa: E731
            indexed, documents, objective, plan, specials, seed, part, text_vocab_size
        )
        return indexed.num_documents, make

    datasets, notes = build_datasets(open_pair, data_path, split)
    return datasets, [note, *length_notes, *notes]
