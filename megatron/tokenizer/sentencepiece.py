"""Sentencepiece on raw text (Kudo and Richardson 2018): BPE with bytes for what the vocabulary lacks."""

import hashlib
import io
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import TokenizerError

EOD = "<eod>"
LONGEST_LINE = 16384  # characters given to the trainer at once


class SentencePieceTokenizer:
    """A sentencepiece `.model`. Documents end with its `<eod>` token, or `</s>` where it has none."""

    name = "sentencepiece"

    def __init__(self, model_file: str) -> None:
        from sentencepiece import SentencePieceProcessor

        content = Path(model_file).read_bytes()
        if not content:
            raise TokenizerError(f"{model_file} is empty, not a sentencepiece model")
        try:
            self._sp: Any = SentencePieceProcessor(model_proto=content)
        except (RuntimeError, OSError, TypeError):
            raise TokenizerError(f"{model_file} is not a sentencepiece model") from None
        self.vocab_size: int = self._sp.vocab_size()
        self.fingerprint = hashlib.sha256(content).hexdigest()
        eod = self._sp.piece_to_id(EOD)
        self.eod: int = eod if self._sp.id_to_piece(eod) == EOD else self._sp.eos_id()
        if self.eod < 0:
            raise TokenizerError(f"{model_file} has neither {EOD} nor </s> to end a document with")

    def encode(self, text: str) -> list[int]:
        return self._sp.encode(text)  # type: ignore[no-any-return]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Ids of each text. One thread: callers run a process a core."""
        batch = self._sp.encode(list(texts), num_threads=1)
        return [np.array(ids, dtype=np.int32) for ids in batch]

    def decode(self, ids: Sequence[int]) -> str:
        return self._sp.decode([int(i) for i in ids if i != self.eod])  # type: ignore[no-any-return]


def _coverage(lines: Sequence[str], vocab_size: int) -> float:
    """Share of the characters of the text that get tokens of their own; the rest become bytes.

    At most half of the vocabulary goes to single characters, or none would be left for words
    in a script of thousands of them.
    """
    counts = Counter(char for line in lines for char in line)
    common = sum(count for _, count in counts.most_common((vocab_size - 256) // 2))
    return max(0.98, min(0.9995, common / max(counts.total(), 1)))  # sentencepiece takes no less than 0.98


def train(texts: Iterable[str], model_file: str, vocab_size: int, model_type: str = "bpe") -> None:
    """Train a lossless tokenizer on some texts and write it to `model_file`.

    Nothing is normalised, spaces and newlines are kept, and characters outside the vocabulary
    become bytes. Reproducible: the same texts give the same file.
    Raises TokenizerError if the text is too small for `vocab_size`.
    """
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    # The trainer drops longer lines without a word.
    lines = [
        line[at : at + LONGEST_LINE]
        for text in texts
        for line in text.split("\n")
        for at in range(0, len(line), LONGEST_LINE)
    ]
    try:
        SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=_coverage(lines, vocab_size),
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            split_digits=True,
            max_sentence_length=4 * LONGEST_LINE,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            unk_id=0,
            control_symbols=[EOD],
            user_defined_symbols=["\n"],
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1][:200]
        raise TokenizerError(
            f"cannot train {vocab_size} tokens on this text; try a smaller --vocab-size ({reason})"
        ) from None
    temporary = f"{model_file}.{os.getpid()}.tmp"
    Path(model_file).parent.mkdir(parents=True, exist_ok=True)
    Path(temporary).write_bytes(model.getvalue())
    os.replace(temporary, model_file)
