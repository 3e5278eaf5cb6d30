"""What every tokenizer answers to."""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class TokenizerError(ValueError):
    """A vocabulary file is missing or is not what it should be; the message names it."""


def read_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds. Raises ValueError, with the file's name, for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of decoding, or of JSON
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {str(content)[:40]!r}, not an object with keys")
    return content


class Tokenizer(ABC):
    """Text to ids and back.

    vocab_size: number of ids. eod: the id that ends a document. fingerprint: the same for
    tokenizers that give the same ids, another for any other. specials: ids that no text gives, by name.
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

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of a text, without an end."""
        ...

    def encode_inside(self, text: str) -> list[int]:
        """Ids of a text that goes on after a special token."""
        return self.encode(text)

    def encode_names(self, text: str) -> list[int]:
        """Ids of a text in which names of special tokens stand for these tokens, as in transformers."""
        names = "|".join(map(re.escape, sorted(self.specials, key=len, reverse=True)))
        ids: list[int] = []
        for part in filter(None, re.split(f"({names})", text) if names else [text]):
            if part in self.specials:
                ids.append(self.specials[part])
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


def byte_piece(byte: int) -> str:
    """How vocabularies write a token that stands for one byte of UTF-8."""
    return f"<0x{byte:02X}>"
