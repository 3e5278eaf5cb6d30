"""The two tokenizers of CPM. Both split text into words with jieba, and then split the words into tokens.

The tokenizer of CPM-1 splits words with sentencepiece, that of CPM-Pretrain by longest match in a vocabulary. Both
represent a space as U+2582 and a newline as U+2583. They are lossless if the vocabulary has a token for each byte, like
vocabularies from tools/train_tokenizer.py. CPM's published vocabularies have no byte tokens, so characters that are not
in the vocabulary become <unk>.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..json_text import parse_json
from .base import Tokenizer, TokenizerError, byte_piece, fingerprint
from .segment import SEPARATOR, segmenter
from .sentencepiece import EOD, open_model
from .sentencepiece import MARK as WORD
from .sentencepiece import NEWLINE as NEWLINE
from .sentencepiece import SPACE as SPACE

_MARKS = re.compile(f"([{WORD}{SPACE}{NEWLINE}])")
LONGEST_WORD = 200  # in characters; as in CPM, longer words become <unk> if the vocabulary has no byte tokens


def joined_words(cut_text: str) -> str:
    """Return the input for CPM's sentencepiece model: words separated by spaces; U+2582, U+2583 for space, newline.

    cut_text: text whose words are separated by SEPARATOR.
    """
    return cut_text.replace(" ", SPACE).replace("\n", NEWLINE).replace(SEPARATOR, " ")


def named(kind: str, cut_with: str) -> str:
    """Return the name of the tokenizer, including the segmenter `cut_with` unless it is jieba.

    The name is part of the fingerprint because different segmenters may give different ids.
    """
    return kind if cut_with == "jieba" else f"{kind}+{cut_with}"


class _ByPieces(Tokenizer):
    """Base class of both CPM tokenizers.

    The characters U+2581 to U+2583 have a special meaning in the vocabulary, so in a text they are encoded as bytes.
    """

    _bytes: list[int]  # ids of the tokens for the 256 bytes; empty if the vocabulary has no such tokens
    _table: list[bytes]  # id -> UTF-8 text of the token

    def encode(self, text: str) -> list[int]:
        return self._ids(text).tolist()  # type: ignore[no-any-return]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        return [self._ids(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        table = self._table
        eod = self.eod
        return b"".join(table[i] for i in ids if i != eod).decode("utf-8", errors="replace")

    def _ids(self, text: str) -> NDArray[np.int32]:
        if not self._bytes or not _MARKS.search(text):
            return self._plain(text)
        ids = []
        for i, part in enumerate(_MARKS.split(text)):
            if not part:
                continue
            is_mark = i % 2 == 1
            found = self._ids_of_mark(part) if is_mark else self._plain(part)
            ids.append(found)
        return np.concatenate(ids)

    def _ids_of_mark(self, mark: str) -> NDArray[np.int32]:
        return np.array([self._bytes[byte] for byte in mark.encode()], np.int32)

    def _make_table(self, pieces: Mapping[str, int]) -> None:
        """Make `_bytes` and `_table` from the vocabulary, name -> id."""
        self._table = [b""] * self.vocab_size
        for piece, i in pieces.items():
            self._table[i] = piece.replace(WORD, "").replace(SPACE, " ").replace(NEWLINE, "\n").encode()
        self._bytes = []
        if byte_piece(0) in pieces:
            self._bytes = [pieces[byte_piece(b)] for b in range(256)]
        for b, i in enumerate(self._bytes):
            self._table[i] = bytes([b])

    def _plain(self, text: str) -> NDArray[np.int32]:
        raise NotImplementedError


class CpmTokenizer(_ByPieces):
    """Tokenizer of CPM-1: a sentencepiece model whose input is the words of jieba, separated by spaces."""

    def __init__(self, model_file: str, cut_with: str = "jieba") -> None:
        self.name = named("cpm", cut_with)
        self._model = open_model(model_file)
        self._cut = segmenter(cut_with)
        self.vocab_size = self._model.vocab_size()
        pieces = {self._model.id_to_piece(i): i for i in range(self.vocab_size)}
        end = next((name for name in (EOD, "</s>") if name in pieces), None)
        if end is None:
            raise TokenizerError(f"{model_file} has no end-of-document token, neither {EOD} nor </s>")
        self.eod = pieces[end]
        self._make_table(pieces)
        self.specials = {piece: i for piece, i in pieces.items() if self._model.is_control(i)}
        for i in self.specials.values():
            self._table[i] = b""
        self.fingerprint = fingerprint(self.name, Path(model_file).read_bytes())

    def _plain(self, text: str) -> NDArray[np.int32]:
        return self._model.encode(joined_words(self._cut(text)), return_type="numpy")  # type: ignore[no-any-return]


class CpmVocabTokenizer(_ByPieces):
    """Tokenizer of CPM-Pretrain: splits each word of jieba by greedy longest match in a vocabulary.

    A .txt vocabulary has one token per line. The id of a token is its line number, starting at 0. A .json vocabulary
    maps tokens to ids.
    """

    def __init__(self, vocab_file: str, cut_with: str = "jieba") -> None:
        self.name = named("cpm-vocab", cut_with)
        content = Path(vocab_file).read_bytes()
        self._vocabulary = read_vocabulary(vocab_file, content)
        self._cut = segmenter(cut_with)
        self.vocab_size = max(self._vocabulary.values()) + 1
        if EOD not in self._vocabulary:
            raise TokenizerError(f"{vocab_file} has no end-of-document token {EOD}")
        self.eod = self._vocabulary[EOD]
        self._make_table(self._vocabulary)
        self.specials = {t: i for t, i in self._vocabulary.items() if re.fullmatch(r"<(?!0x)\w+>", t)}
        self._matched = {t: i for t, i in self._vocabulary.items() if t not in self.specials}
        self._longest = max(map(len, self._vocabulary))
        self._unknown = self._vocabulary.get("<unk>")
        self._word = lru_cache(maxsize=1 << 17)(self._match)
        self.fingerprint = fingerprint(self.name, content)

    def _plain(self, text: str) -> NDArray[np.int32]:
        cut = self._cut(text).replace(" ", SPACE).replace("\n", NEWLINE)
        words = cut.split(SEPARATOR) if cut else []
        return np.array(list(itertools.chain.from_iterable(map(self._word, words))), dtype=np.int32)

    def _match(self, word: str) -> tuple[int, ...]:
        if len(word) > LONGEST_WORD and not self._bytes and self._unknown is not None:
            return (self._unknown,)
        found: list[int] = []
        at = 0
        while at < len(word):
            end = min(len(word), at + self._longest)
            while end > at and word[at:end] not in self._matched:
                end -= 1
            if end > at:
                found.append(self._matched[word[at:end]])
                at = end
            else:
                found += self._spell(word[at])
                at += 1
        return tuple(found)

    def _spell(self, char: str) -> list[int]:
        if self._bytes:
            return [self._bytes[b] for b in char.encode()]
        if self._unknown is None:
            raise TokenizerError(f"cannot encode {char!r}: the vocabulary lacks it and has no byte tokens or <unk>")
        return [self._unknown]


def read_vocabulary(vocab_file: str, content: bytes) -> dict[str, int]:
    """Return the vocabulary as token -> id. Raises TokenizerError for a malformed file."""
    try:
        text = content.decode("utf-8")
        if not vocab_file.endswith(".json"):
            tokens = text.removesuffix("\n").split("\n")
            return {token: i for i, token in enumerate(tokens)}
        found: dict[str, int] = parse_json(text, "its JSON", dict)
    except ValueError as error:
        raise TokenizerError(f"{vocab_file} is not a vocabulary: {error}") from None
    if not found or not all(isinstance(i, int) and i >= 0 for i in found.values()):
        raise TokenizerError(f"{vocab_file} is not a vocabulary: the file is not a JSON object that maps tokens to ids")
    return found
