"""Interface of all tokenizers, and helpers that tokenizers share."""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..json_text import read_json

SENTINEL = re.compile(r"<(?:extra_id_|s_)(\d+)>")  # names of T5's sentinels, also in CPM's form
# The characters that added tokens with the flags lstrip and rstrip absorb: \s in the regular expressions of tokenizers
WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
IdArray = NDArray[np.int32]


class TokenizerError(ValueError):
    """Error for a vocabulary file that is missing or malformed; the message names the file."""


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file `path`. Raises ValueError, with `path` in its message, for other content."""
    return read_json(path, dict)


class Tokenizer(ABC):
    """Base class of tokenizers, which convert text to token ids and back.

    vocab_size: number of ids. eod: end-of-document id. fingerprint: hash of everything that determines the ids, so
    two tokenizers with the same fingerprint give the same ids. specials: special tokens as name -> id; plain text is
    never encoded to these ids. marks: `specials` plus other added tokens that chat templates and fill-in-the-middle
    may use by name. start: ids that the model expects before every text, such as Llama's <|begin_of_text|>, or ().
    lstrip_ids, rstrip_ids: ids of added tokens that absorb the white space before or after their names in a text.
    contradiction: a sentence about a setting next to the vocabulary that this tokenizer does not follow, or "".
    """

    name: str
    vocab_size: int
    eod: int
    fingerprint: str
    specials: dict[str, int]
    start: tuple[int, ...] = ()
    bos: int | None = None
    lstrip_ids: frozenset[int] = frozenset()
    rstrip_ids: frozenset[int] = frozenset()
    contradiction: str = ""

    @property
    def before(self) -> tuple[int, ...]:
        """Ids to put before a text whose tokens are scored: `start`, or `eod` if `start` is empty."""
        return self.start or (self.eod,)

    @property
    def marks(self) -> dict[str, int]:
        """Special tokens and other added tokens that a chat template may use by name, as name -> id."""
        return self.specials

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without an end-of-document token."""
        ...

    def encode_inside(self, text: str) -> list[int]:
        """Return the ids that `text` has when it follows a special token and does not start a document."""
        return self.encode(text)

    def encode_content(self, text: str, inside: bool = False, after_text: bool = False) -> list[int]:
        """Return the ids of the content of a chat message. Names of special tokens in it are encoded as plain text.

        inside: True if the content does not start the conversation. after_text: True if it follows text directly, not
        a special token, so that no space is prepended.
        """
        return self.encode_inside(text) if inside else self.encode(text)

    def content_spans(
        self, text: str, inside: bool = False, after_text: bool = False
    ) -> list[tuple[int, int, int]] | None:
        """Return (id, first character, end) of each token of `encode_content`, or None if they are unknown."""
        return None

    def encode_names(self, text: str) -> list[int]:
        """Return the ids of `text`, encoding the name of each token in `marks` as this token.

        The tokenizers of transformers encode text in the same way.
        """
        marks = self.marks
        ids = list[int]()
        for part in filter(None, any_name_pattern(marks).split(text)):  # split() may also return empty parts
            if part in marks:
                ids.append(marks[part])
            else:  # with ids before it, the part follows the name of a token
                ids += self.encode_inside(part) if ids else self.encode(part)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[IdArray]:
        """Return the ids of each text, computed in one thread. Callers that need parallelism start processes."""
        return [np.array(self.encode(text), dtype=np.int32) for text in texts]

    def refuse_contradiction(self) -> None:
        """Raise TokenizerError if there is a `contradiction`. Call this for new corpora and imported models.

        Runs and corpora that already have the ids of this tokenizer continue with them.
        """
        if self.contradiction:
            raise TokenizerError(self.contradiction)

    def slow_reason(self) -> str:
        """Return why `encode_batch` cannot use a faster package; "" if it can, or if there is none."""
        return ""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, omitting `eod` and ids beyond the vocabulary, for which --vocab-size leaves room.

        Ids that form an incomplete UTF-8 character become U+FFFD.
        """

    def padded_vocab_size(self, multiple: int) -> int:
        """Return the number of rows of the embedding: the vocabulary size rounded up to a multiple of `multiple`."""
        return (self.vocab_size + multiple - 1) // multiple * multiple


def fingerprint(kind: str, *contents: bytes) -> str:
    """Return the hexadecimal SHA-256 of the kind of a tokenizer and of the contents of its files."""
    digest = hashlib.sha256(kind.encode())
    for content in contents:
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def eod_mismatch(metadata: Mapping[str, Any], tokenizer: Tokenizer, vocab_file: str | None) -> str:
    """Return a message if a corpus and `tokenizer` use different end-of-document tokens, else "".

    metadata: metadata of the corpus (PREFIX.json). Call this function only if corpus and tokenizer have equal
    fingerprints. Then their tokenizer.json is the same, but they may still have different end-of-document tokens: the
    token may come from tokenizer_config.json, which often differs between a base model and its chat model.
    """
    corpus_eod = metadata.get("eod")
    # Older corpora do not record their token, and without `append_eod` it does not occur.
    if not isinstance(corpus_eod, int) or not metadata.get("append_eod", True):
        return ""
    if corpus_eod == tokenizer.eod:
        return ""
    names = {i: f" ({name})" for name, i in tokenizer.marks.items()}
    ours = f"{tokenizer.eod}{names.get(tokenizer.eod, '')}"
    theirs = f"{corpus_eod}{names.get(corpus_eod, '')}"
    return f"ends its documents with token {theirs}, but {vocab_file} with {ours}"


def any_name_pattern(names: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of the names, and where several match, the longest.

    The pattern is a group, so `pattern.split(text)` keeps the names in its result.
    """
    longest_first = sorted(names, key=len, reverse=True)
    escaped = map(re.escape, longest_first)
    alternatives = "|".join(escaped) or "(?!)"  # (?!) matches nowhere
    return re.compile(f"({alternatives})")


def split_name_pattern(names: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern whose matches start after the first character of each of the names in a text.

    Cutting the text at the start of each match leaves no part that contains a whole name.
    """
    # For the name <s>, (?<=<)s> matches s> after a <.
    cuts = [f"(?<={re.escape(name[0])}){re.escape(name[1:])}" for name in names if len(name) > 1]
    return re.compile("|".join(cuts) or "(?!)")


def byte_piece(byte: int) -> str:
    """Return the name of the token for one byte, such as `<0x0A>`."""
    return f"<0x{byte:02X}>"
