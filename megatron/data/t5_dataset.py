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

from .corpora import Make, Paths, build_datasets, prefixes_of
from .corpus_dataset import CorpusDataset
from .index_check import open_corpus
from .indexed_dataset import IndexedDataset
from .sample_order import Windows
from .short_documents import fit_documents
from .spans import SpanPlan, draw_spans, draw_spans_to_document_ends, plan_spans, splice

Sample = dict[str, Tensor]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Specials:
    """Ids of special tokens.

    sentinels: ids of the first, second, ... sentinel. eod: end-of-document id; with convention `t5`, also the last id
    of encoder input and labels.
    """

    eod: int
    pad: int
    sentinels: tuple[int, ...]


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
        ends = self.convention == "t5"
        if self.name == "prefix-lm":
            answer = decoder or max(encoder // 4, 1)
            return SpanPlan(encoder - ends + answer - 1, answer - 1, 1, encoder, answer)
        return plan_spans(encoder, decoder, self.noise_density, self.mean_span_length, sentinels, ends)


class T5Samples(CorpusDataset):
    """Base of T5 datasets; a sample is a dict of int64 tensors of k encoder or q decoder tokens.

    Sample n exists for any n >= 0. encoder, decoder, labels: padded token ids [k], [q], [q].
    encoder_document_ids [k], decoder_document_ids [q]: number of each token's document in the sample, starting at 1;
    0 for padding. loss_mask [q]: 1 where a label counts in the loss, else 0.
    """

    plan: SpanPlan
    specials: Specials

    def padded(self, encoder: Ids, documents: Ids, decoder: Ids, labels: Ids, owner: Ids) -> Sample:
        """Return the sample, padded to `plan.encoder` encoder tokens and `plan.decoder` decoder tokens.

        documents: document id of each encoder token. owner: document id of each decoder token.
        """
        k = self.plan.encoder
        q = self.plan.decoder

        def fill(values: Ids, length: int, filler: int) -> Tensor:
            if len(values) == length:
                return torch.from_numpy(values)
            out = np.full(length, filler, dtype=np.int64)
            out[: len(values)] = values
            return torch.from_numpy(out)

        pad = self.specials.pad
        return {
            "encoder": fill(encoder, k, pad),
            "decoder": fill(decoder, q, pad),
            "labels": fill(labels, q, pad),
            "encoder_document_ids": fill(documents, k, 0),
            "decoder_document_ids": fill(owner, q, 0),
            "loss_mask": fill(np.ones(len(labels), dtype=np.int64), q, 0),
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
        self.objective = objective
        self.plan = plan
        self.specials = specials
        self.windows = Windows(indexed, documents, plan.tokens, seed, f"{part} spans", 0, text_vocab_size)
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
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([*self.seed, int(n)])))
        if self.objective.name == "prefix-lm":
            masked = np.arange(len(text)) >= len(text) - self.plan.noise
            first = np.diff(masked, prepend=False)
            used = len(text)
        elif self.objective.convention == "t5":
            masked, first = draw_spans(rng, self.plan)
            used = len(text)
        else:
            masked, first, used = draw_spans_to_document_ends(rng, self.plan, text == self.specials.eod)
        return self._sample(text[:used], documents[:used], masked[:used], first[:used])

    def _sample(self, text: Ids, documents: Ids, masked: NDArray[np.bool_], first: NDArray[np.bool_]) -> Sample:
        """Return the sample for a text; `masked` and `first` mark the tokens and the first tokens of its spans."""
        count = int(first.sum())
        if self.objective.name == "prefix-lm":
            encoder = text[~masked]
            written = text[masked]
            seen = documents[~masked]
            owner = documents[masked]
        else:
            encoder, written, _ = splice(text, masked, first, self.sentinels[:count])
            # A sentinel belongs to the document of the span that it replaces.
            seen = documents[~masked | first]
            owner = np.repeat(documents[masked], 1 + first[masked])
        if self.objective.convention == "t5":
            return self._t5(encoder, seen, written, owner)
        if self.objective.name == "prefix-lm":
            written = np.append(self.sentinels[0], written)
            owner = np.append(owner[:1], owner)
        closed = np.append(written, self.sentinels[count])
        return self.padded(encoder, seen, closed[:-1], closed[1:], owner)

    def _t5(self, encoder: Ids, documents: Ids, written: Ids, owner: Ids) -> Sample:
        eod = self.specials.eod
        decoder = np.concatenate([[self.specials.pad], written])
        return self.padded(
            np.append(encoder, eod), np.append(documents, documents[-1]), decoder, np.append(written, eod),
            np.append(owner, owner[-1]),
        )  # fmt: skip


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
    short = ""
    if objective.convention == "cpm" and objective.name == "span-corruption":
        sizes = [indexed.document_sizes(range(indexed.num_documents)) for indexed in corpora.values()]
        share = objective.noise_density
        span = objective.mean_span_length
        plan, short = fit_documents(plan, sizes, share, span, dec_seq_length, len(specials.sentinels))
    note = f"a sample is {plan.tokens} tokens of text: {plan.encoder} in the encoder, {plan.decoder} in the decoder"

    def open_(prefix: str) -> tuple[int, Make]:
        indexed = corpora[prefix]
        make = lambda documents, part: T5Dataset(  # noqa: E731
            indexed, documents, objective, plan, specials, seed, part, text_vocab_size
        )
        return indexed.num_documents, make

    datasets, notes = build_datasets(open_, data_path, split)
    return datasets, [note, *([short] if short else []), *notes]
