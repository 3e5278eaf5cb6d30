"""Tokens of the chunks of a corpus, computed by the worker processes of tools/preprocess_data.py."""

import argparse
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from data_utils.chat_encoder import ChatEncoder
from data_utils.chat_templates import Piece
from data_utils.indexed_writer import cast_ids
from megatron.data.cpm_masking import mask_document
from megatron.data.indexed_dataset import best_dtype
from megatron.tokenizer import Tokenizer, load_tokenizer

from . import chats
from .cli import max_document_bytes
from .documents import Chunk, documents
from .sentences import split_sentences
from .streams import BadLine


class PairTokens(NamedTuple):
    """Tokens of one chunk for one of the output pairs."""

    ids: NDArray[Any]  # all tokens, concatenated
    lengths: NDArray[np.int32]  # number of tokens of each sequence
    sequences: NDArray[np.int32]  # number of sequences of each document


class TokenizedChunk(NamedTuple):
    """The tokens of one chunk, as a worker process returns them."""

    parts: list[PairTokens]
    bad: list[BadLine]
    empty: int
    source_bytes: int


class _Worker:
    """Settings of a worker process, set once when it starts."""

    args: argparse.Namespace
    tokenizer: Tokenizer
    start: NDArray[np.int32]
    eod: NDArray[np.int32]
    keys: Any  # the record's keys to tokenize, or a function that extracts a conversation from a record
    chat: ChatEncoder


def start_worker(args: argparse.Namespace, fingerprint: str) -> None:
    """Load the tokenizer in a worker process. fingerprint: that of the tokenizer which the sidecar will name."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the worker processes already use all cores
    tokenizer = load_tokenizer(args.vocab_file, args.tokenizer_type)
    if tokenizer.fingerprint != fingerprint:
        raise ValueError(f"{args.vocab_file} has changed since the start; start again")
    _Worker.args = args
    _Worker.tokenizer = tokenizer
    _Worker.start = np.array(tokenizer.start, dtype=np.int32)
    end_ids = [tokenizer.eod] if args.append_eod else []
    _Worker.eod = np.array(end_ids, dtype=np.int32)
    _Worker.keys = args.keys
    if args.objective == "sft":
        template = chats.template_of(args, tokenizer)
        # `documents` calls this function with each record, so a document is then a tuple of pieces, not of texts.
        _Worker.keys = lambda record: template.pieces(chats.messages_of(record))
        _Worker.chat = ChatEncoder(tokenizer, args.append_eod)


def tokenize(chunk: Chunk) -> TokenizedChunk:
    """Read and encode one chunk in a worker process."""
    args = _Worker.args
    good = []
    bad = []
    empty = 0
    for document in documents(chunk, _Worker.keys, args.seed, max_document_bytes(args)):
        if isinstance(document, BadLine):
            bad.append(document)
        # A document is left out if one of its texts is "". A document of pieces (--objective sft) is never left out, as
        # a piece is a tuple and so counts as true.
        elif all(document):
            good.append(document)
        else:
            empty += 1
    return TokenizedChunk(_encode_documents(chunk, good), bad, empty, chunk.length)


def _encode_documents(chunk: Chunk, document_list: list[tuple[Any, ...]]) -> list[PairTokens]:
    """Encode the documents of a chunk; return one part for each output pair.

    document_list: for each document its text under each of --keys or, with --objective sft, the pieces of a
    conversation.
    """
    objective = _Worker.args.objective
    if objective == "sft":
        return _encode_conversations(document_list)
    parts = []
    for column in range(len(_Worker.args.keys)):
        texts = [document[column] for document in document_list]
        if objective == "cpm-t5":
            parts += _mask_spans(chunk, texts)
        else:
            parts.append(_encode_texts(texts))
    return parts


def _encode_texts(texts: list[str]) -> PairTokens:
    """Encode the texts of one chunk for one output pair."""
    pieces: list[str] = []
    counts = []
    for text in texts:
        split = split_sentences(text) if _Worker.args.split_sentences else [text]
        pieces += split
        counts.append(len(split))
    encoded = _encode_distinct(pieces)
    # Documents of 2 and 3 sentences end before sequences 2 and 5 and begin with sequences 0 and 2.
    ends = np.cumsum(counts, dtype=np.int64)
    if len(_Worker.eod):
        for last in ends - 1:
            encoded[last] = np.append(encoded[last], _Worker.eod)
    if len(_Worker.start):
        for first in ends - counts:
            encoded[first] = np.append(_Worker.start, encoded[first])
    dtype = best_dtype(_Worker.tokenizer.vocab_size)
    return _concatenate(encoded, dtype, counts)


def _encode_distinct(texts: Sequence[str]) -> list[NDArray[np.int32]]:
    """Return the ids of each text. Equal texts, as the copies of FILE@50 are, take the memory of one."""
    distinct = list(dict.fromkeys(texts))
    encoded = _Worker.tokenizer.encode_batch(distinct)
    ids_of = dict(zip(distinct, encoded, strict=True))
    return [ids_of[text] for text in texts]


def _concatenate(sequences: list[NDArray[Any]], dtype: DTypeLike, counts: Sequence[int]) -> PairTokens:
    """Concatenate sequences of tokens. counts: number of sequences of each document."""
    ids = np.concatenate(sequences) if sequences else np.empty(0, np.int32)
    lengths = np.fromiter(map(len, sequences), np.int32)
    return PairTokens(cast_ids(ids, np.dtype(dtype), "the output"), lengths, np.array(counts, dtype=np.int32))


def _encode_conversations(conversations: list[tuple[Piece, ...]]) -> list[PairTokens]:
    """Return the tokens of conversations and the loss mask of these tokens, as two parts."""
    ids: list[NDArray[Any]] = []
    loss_masks: list[NDArray[Any]] = []
    for pieces in conversations:
        new_ids, new_mask = _Worker.chat.encode(pieces)
        ids.append(np.array(new_ids, np.int32))
        loss_masks.append(np.array(new_mask, np.uint8))
    counts = [1] * len(conversations)  # each conversation is a document of one sequence
    dtype = best_dtype(_Worker.tokenizer.vocab_size)
    return [_concatenate(ids, dtype, counts), _concatenate(loss_masks, np.uint8, counts)]


def _mask_spans(chunk: Chunk, texts: list[str]) -> list[PairTokens]:
    """Mask spans for CPM's T5, seeded by each document's position; return contexts, targets and target offsets."""
    args = _Worker.args
    vocab_size = _Worker.tokenizer.vocab_size
    columns: tuple[list[NDArray[np.int64]], ...] = ([], [], [])
    encoded = _encode_distinct(texts)
    for number, ids in enumerate(encoded):
        seed = (args.seed, chunk.source.number, chunk.start, number)
        whole = np.concatenate([_Worker.start, ids, _Worker.eod])
        masked = mask_document(whole, vocab_size, args.noise_density, args.mean_span_length, seed)
        for column, piece in zip(columns, masked, strict=True):
            column.append(piece)
    counts = [1] * len(texts)  # each document is one sequence
    # Sentinel ids follow the vocabulary, and a document may have any number of spans, so ids need int32.
    return [_concatenate(pieces, np.int32, counts) for pieces in columns]
