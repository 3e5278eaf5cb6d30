"""What every tokenizer answers to, and how one is found from a file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class TokenizerError(ValueError):
    """A vocabulary file is missing or is not what it should be; the message names it."""


class Tokenizer(Protocol):
    """Text to ids and back.

    vocab_size: number of ids. eod: the id that ends a document. fingerprint: the same for
    tokenizers that give the same ids, another for any other.
    """

    name: str
    vocab_size: int
    eod: int
    fingerprint: str

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


def load_tokenizer(vocab_file: str) -> Tokenizer:
    """The tokenizer in `vocab_file`, a sentencepiece model. Raises TokenizerError."""
    if not Path(vocab_file).is_file():
        raise TokenizerError(f"there is no vocabulary file {vocab_file}; tools/train_tokenizer.py makes one")
    from .sentencepiece import SentencePieceTokenizer

    return SentencePieceTokenizer(vocab_file)
