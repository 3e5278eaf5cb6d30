"""The two tokenizers of CPM. Both split text into words with jieba, and then split the words into tokens.

The tokenizer of CPM-1 splits words with sentencepiece, that of CPM-Pretrain by longest match in a vocabulary. Both
represent a space as U+2582 and a newline as U+2583. They are lossless if the vocabulary has a token for each byte, like
vocabularies from tools/train_tokenizer.py. CPM's published vocabularies have no byte tokens, so characters that are not
in the vocabulary become <unk>.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from ..json_text import parse_json
from .base import IdArray, Tokenizer, TokenizerError, byte_piece, fingerprint
from .segment import SEPARATOR, segmenter
from .sentencepiece import EOD, open_model
from .sentencepiece import MARK as WORD
from .sentencepiece import NEWLINE as NEWLINE
from .sentencepiece import SPACE as SPACE

_RESERVED_CHARS = re.compile(f"([{WORD}{SPACE}{NEWLINE}])")
LONGEST_WORD = 200  # in characters; as in CPM, longer words become <unk> if the vocabulary has no byte tokens


def join_words(cut_text: str) -> str:
    """Return the input for CPM's sentencepiece model: words separated by spaces; U+2582, U+2583 for space, newline.

    cut_text: text whose words are separated by SEPARATOR.
    """
    return cut_text.replace(" ", SPACE).replace("\n", NEWLINE).replace(SEPARATOR, " ")


def tokenizer_name(kind: str, cut_with: str) -> str:
    """Return the name of the tokenizer, including the segmenter `cut_with` unless it is jieba.

    The name is part of the fingerprint because different segmenters may give different ids.
    """
    return kind if cut_with == "jieba" else f"{kind}+{cut_with}"


class _CpmBase(Tokenizer):
    """Base class of both CPM tokenizers.

    The characters U+2581 to U+2583 have a special meaning in the vocabulary, so in a text they are encoded as bytes.
    """

    _byte_ids: list[int]  # ids of the tokens for the 256 bytes; empty if the vocabulary has no such tokens
    _token_bytes: list[bytes]  # id -> UTF-8 text of the token

    def encode(self, text: str) -> list[int]:
        return self._encode_ids(text).tolist()  # type: ignore[no-any-return]

    def encode_batch(self, texts: Sequence[str]) -> list[IdArray]:
        return [self._encode_ids(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        token_bytes = self._token_bytes
        eod = self.eod
        size = self.vocab_size
        return b"".join(token_bytes[i] for i in ids if i != eod and i < size).decode("utf-8", errors="replace")

    def _encode_ids(self, text: str) -> IdArray:
        """Return the ids of a text; characters that mean something else in the vocabulary are encoded as bytes."""
        if not self._byte_ids or not _RESERVED_CHARS.search(text):
            return self._encode_plain(text)
        ids = []
        for i, part in enumerate(_RESERVED_CHARS.split(text)):
            if not part:
                continue
            if i % 2:  # split() puts the matches of the pattern at odd indices
                ids.append(np.array([self._byte_ids[byte] for byte in part.encode()], np.int32))
            else:
                ids.append(self._encode_plain(part))
        return np.concatenate(ids)

    def _build_tables(self, pieces: Mapping[str, int]) -> None:
        """Make `_byte_ids` and `_token_bytes` from the vocabulary, name -> id."""
        self._token_bytes = [b""] * self.vocab_size
        for piece, i in pieces.items():
            # WORD marks only where a word begins, and is no part of the text.
            text = piece.replace(WORD, "").replace(SPACE, " ").replace(NEWLINE, "\n")
            self._token_bytes[i] = text.encode()
        self._byte_ids = []
        if byte_piece(0) in pieces:
            self._byte_ids = [pieces[byte_piece(b)] for b in range(256)]
        for b, i in enumerate(self._byte_ids):
            self._token_bytes[i] = bytes([b])  # in place of the token's name, such as <0x0A>

    def _encode_plain(self, text: str) -> IdArray:
        raise NotImplementedError


class CpmTokenizer(_CpmBase):
    """Tokenizer of CPM-1: a sentencepiece model whose input is the words of jieba, separated by spaces."""

    def __init__(self, model_file: str, cut_with: str = "jieba") -> None:
        self.name = tokenizer_name("cpm", cut_with)
        model = open_model(model_file)
        self._model = model
        self._cut = segmenter(cut_with)
        self.vocab_size = model.vocab_size()
        pieces = {model.id_to_piece(i): i for i in range(self.vocab_size)}
        end = EOD if EOD in pieces else "</s>"
        if end not in pieces:
            raise TokenizerError(f"{model_file} has no end-of-document token, neither {EOD} nor </s>")
        self.eod = pieces[end]
        self._build_tables(pieces)
        self.specials = {}
        for piece, i in pieces.items():
            if model.is_control(i):
                self.specials[piece] = i
                self._token_bytes[i] = b""  # control tokens have no text
        self.fingerprint = fingerprint(self.name, Path(model_file).read_bytes())

    def _encode_plain(self, text: str) -> IdArray:
        return self._model.encode(join_words(self._cut(text)), return_type="numpy")  # type: ignore[no-any-return]


class CpmVocabTokenizer(_CpmBase):
    """Tokenizer of CPM-Pretrain: splits each word of jieba by greedy longest match in a vocabulary.

    A .txt vocabulary has one token per line. The id of a token is its line number, starting at 0. A .json vocabulary
    maps tokens to ids.
    """

    def __init__(self, vocab_file: str, cut_with: str = "jieba") -> None:
        self.name = tokenizer_name("cpm-vocab", cut_with)
        content = Path(vocab_file).read_bytes()
        vocabulary = read_vocabulary(vocab_file, content)
        self._cut = segmenter(cut_with)
        self.vocab_size = max(vocabulary.values()) + 1
        if EOD not in vocabulary:
            raise TokenizerError(f"{vocab_file} has no end-of-document token {EOD}")
        self.eod = vocabulary[EOD]
        self._build_tables(vocabulary)
        self.specials = {}
        self._ordinary_tokens = {}
        for token, i in vocabulary.items():
            # Names such as <eod>, but not those of byte tokens such as <0x0A>.
            if re.fullmatch(r"<(?!0x)\w+>", token):
                self.specials[token] = i
            else:
                self._ordinary_tokens[token] = i
            if token.startswith(WORD) and len(token) > 1:
                self.contradiction = (
                    f"{vocab_file} lists the pieces of a sentencepiece model, such as {token!r}: give this model "
                    "(chinese_vocab.model for CPM-1)"
                )
        self._max_token_length = max(map(len, vocabulary))
        self._unknown = vocabulary.get("<unk>")
        self._cached_match = lru_cache(maxsize=1 << 17)(self._match_longest)  # most words occur again and again
        self.fingerprint = fingerprint(self.name, content)

    def _encode_plain(self, text: str) -> IdArray:
        words = join_words(self._cut(text))
        ids: list[int] = []
        for word in words.split(" "):  # an empty text gives one empty word, which has no ids
            ids += self._cached_match(word)
        return np.array(ids, dtype=np.int32)

    def _match_longest(self, word: str) -> tuple[int, ...]:
        """Return the ids of a word: at each position that of the longest token, else those of one character."""
        size = len(word)
        tokens = self._ordinary_tokens
        # As in CPM, a word of more characters is a single <unk>, unless its characters can be encoded as bytes.
        if size > LONGEST_WORD and not self._byte_ids and self._unknown is not None:
            return (self._unknown,)
        ids = []
        start = 0
        while start < size:
            end = min(size, start + self._max_token_length)
            while end > start and word[start:end] not in tokens:
                end -= 1
            if end > start:  # else no token begins here
                ids.append(tokens[word[start:end]])
                start = end
            else:
                ids += self._spell(word[start])
                start += 1
        return tuple(ids)

    def _spell(self, char: str) -> list[int]:
        """Return the ids of a character without a token: those of its bytes, else of <unk>."""
        if self._byte_ids:
            return [self._byte_ids[b] for b in char.encode()]
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
        vocabulary: dict[str, int] = parse_json(text, "its JSON", dict)
    except ValueError as error:
        raise TokenizerError(f"{vocab_file} is not a vocabulary: {error}") from None
    are_ids = all(isinstance(i, int) and i >= 0 for i in vocabulary.values())
    if not vocabulary or not are_ids:
        raise TokenizerError(f"{vocab_file} is not a vocabulary: the file is not a JSON object that maps tokens to ids")
    return vocabulary
