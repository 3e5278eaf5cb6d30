"""What every tokenizer answers to."""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..json_text import describe_json


class TokenizerError(ValueError):
    """A vocabulary file is missing or is not what it should be; the message names it."""


def read_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds. Raises ValueError, with the file's name, for anything else."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {describe_json(text, error)}") from None
    except RecursionError:
        raise ValueError(f"{path} is not JSON that anybody writes: it is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {str(content)[:40]!r}, not an object with keys")
    return content


class Tokenizer(ABC):
    """Text to ids and back.

    vocab_size: number of ids. eod: the id that ends a document. fingerprint: the same for
    tokenizers that give the same ids, another for any other. specials: ids that no text gives, by name. marks: these
    and all other ids that stand for a name as a whole, which a text may hold: what templates and gaps can be marked with.
    start: ids that its maker puts in front of every text (Llama's <|begin_of_text|>), none if empty.
    """

    name: str
    vocab_size: int
    eod: int
    fingerprint: str
    specials: dict[str, int]
    start: tuple[int, ...] = ()

    @property
    def before(self) -> tuple[int, ...]:
        """What stands before the first token of a text that is scored: `start`, or the end of another text."""
        return self.start or (self.eod,)

    @property
    def marks(self) -> dict[str, int]:
        """Ids by name; see the class."""
        return self.specials

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of a text, without an end."""
        ...

    def encode_inside(self, text: str) -> list[int]:
        """Ids of a text that goes on after a special token."""
        return self.encode(text)

    def encode_content(self, text: str, inside: bool = False) -> list[int]:
        """Ids of what somebody says, in which no name stands for a token of `marks`. inside: it goes on after a special token."""
        return self.encode_inside(text) if inside else self.encode(text)

    def encode_names(self, text: str) -> list[int]:
        """Ids of a text in which names of special tokens stand for these tokens, as in transformers."""
        marks, ids = self.marks, list[int]()
        for part in filter(None, any_of(marks).split(text)):
            if part in marks:
                ids.append(marks[part])
            else:
                ids += self.encode_inside(part) if ids else self.encode(part)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Ids of each text. One thread: callers run a process a core."""
        return [np.array(self.encode(text), dtype=np.int32) for text in texts]

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text again; `eod` is left out. Ids that are part of a character give U+FFFD."""

    def padded_vocab_size(self, multiple: int) -> int:
        """Rows of an embedding whose number is to be divisible by `multiple`."""
        return -(-self.vocab_size // multiple) * multiple


def fingerprint(kind: str, *contents: bytes) -> str:
    """SHA-256 of what decides on the ids, in hexadecimal."""
    digest = hashlib.sha256(kind.encode())
    for content in contents:
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def other_end(about: Mapping[str, Any], tokenizer: Tokenizer, vocab_file: str | None) -> str:
    """That a corpus ends its documents with another token than `tokenizer` of the same fingerprint, in words; "" where it does not.

    about: the sidecar of the corpus. The fingerprint is of tokenizer.json, while the end of a document may stand in
    tokenizer_config.json next to it: a model for texts and one for conversations often share the one and not the other.
    """
    theirs = about.get("eod")
    if not isinstance(theirs, int) or theirs == tokenizer.eod or not about.get("append_eod", True):
        return ""
    names = {i: f" ({name})" for name, i in tokenizer.marks.items()}
    ours = f"{tokenizer.eod}{names.get(tokenizer.eod, '')}"
    return f"ends its documents with token {theirs}{names.get(theirs, '')}, --vocab-file {vocab_file} with {ours}"


def any_of(names: Iterable[str]) -> re.Pattern[str]:
    """Finds any of the names, the longest first; in a group, so that splitting keeps them."""
    return re.compile(f"({'|'.join(map(re.escape, sorted(names, key=len, reverse=True))) or '(?!)'})")


def past_first(names: Iterable[str]) -> re.Pattern[str]:
    """Finds where to cut names so that none is left whole: after the first character of each."""
    return re.compile("|".join(f"(?<={re.escape(n[0])}){re.escape(n[1:])}" for n in names if len(n) > 1) or "(?!)")


def byte_piece(byte: int) -> str:
    """How vocabularies write a token that stands for one byte of UTF-8."""
    return f"<0x{byte:02X}>"
