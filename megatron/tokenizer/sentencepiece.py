"""Sentencepiece on raw text (Kudo and Richardson 2018): BPE or unigram, with bytes for what the vocabulary lacks."""

import hashlib
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import Tokenizer, TokenizerError, byte_piece

EOD = "<eod>"
MARK = "\u2581"  # how pieces write a space


def open_model(model_file: str) -> Any:
    """The processor for a `.model` file. Raises TokenizerError."""
    from sentencepiece import SentencePieceProcessor

    content = Path(model_file).read_bytes()
    if not content:
        raise TokenizerError(f"{model_file} is empty, not a sentencepiece model")
    try:
        return SentencePieceProcessor(model_proto=content)
    except (RuntimeError, OSError, TypeError):
        raise TokenizerError(f"{model_file} is not a sentencepiece model") from None


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece `.model`. Documents end with its `<eod>` token, or `</s>` where it has none.

    Models that tools/train_tokenizer.py makes give every text back as it was. Others may normalise it.
    """

    name = "sentencepiece"

    def __init__(self, model_file: str) -> None:
        self._sp = open_model(model_file)
        self.vocab_size = self._sp.vocab_size()
        self.fingerprint = hashlib.sha256(Path(model_file).read_bytes()).hexdigest()
        eod = self._sp.piece_to_id(EOD)
        self.eod = eod if self._sp.id_to_piece(eod) == EOD else self._sp.eos_id()
        if self.eod < 0:
            raise TokenizerError(f"{model_file} has neither {EOD} nor </s> to end a document with")
        self.specials = {
            self._sp.id_to_piece(i): i
            for i in range(self.vocab_size)
            if self._sp.is_control(i) or self._sp.is_unknown(i)
        }
        # mT5's sentinels are pieces of their own, with the mark of a space in front.
        for i in itertools.takewhile(lambda i: self._piece(f"{MARK}<extra_id_{i}>") is not None, itertools.count()):
            self.specials[f"<extra_id_{i}>"] = self._sp.piece_to_id(f"{MARK}<extra_id_{i}>")
        # Pieces would turn a mark in the text into a space; bytes keep it.
        spelled = [self._sp.piece_to_id(byte_piece(b)) for b in MARK.encode()]
        self._mark = np.array(spelled if self._sp.is_byte(spelled[0]) else [], dtype=np.int32)

    def _piece(self, name: str) -> int | None:
        id_: int = self._sp.piece_to_id(name)
        return id_ if self._sp.id_to_piece(id_) == name else None

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0].tolist()  # type: ignore[no-any-return]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        found: list[NDArray[np.int32]] = self._sp.encode(list(texts), num_threads=1, return_type="numpy")
        if len(self._mark):
            for i, text in enumerate(texts):
                if MARK in text:
                    found[i] = self._encode_marked(text)
        return found

    def _encode_marked(self, text: str) -> NDArray[np.int32]:
        parts = [part for part in re.split(f"({MARK})", text) if part]
        return np.concatenate(
            [self._mark if part == MARK else self._sp.encode(part, return_type="numpy") for part in parts]
        )

    def decode(self, ids: Sequence[int]) -> str:
        return self._sp.decode([int(i) for i in ids if i != self.eod])  # type: ignore[no-any-return]
