"""Sentencepiece on raw text (Kudo and Richardson 2018): BPE or unigram, with byte fallback."""

import functools
import hashlib
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import Tokenizer, TokenizerError, any_of, byte_piece, fingerprint, split_name_pattern
from .beside import SETTINGS, refuse_missing_tokens, settings_beside, token_beside
from .model_proto import USER_DEFINED, read_facts
from .sentinels import MARK as SENTINEL

EOD = "<eod>"
MARK = "\u2581"  # stands for a space in sentencepiece's tokens


# Concatenated protobuf messages merge. Appending these bytes to a model therefore sets
# normalizer_spec.add_dummy_prefix to false.
NO_PREFIX = b"\x1a\x02\x18\x00"
# Tokenizer classes with unclear beginnings of text: add_bos_token is by default true in transformers 4, but false in
# transformers 5.
UNCLEAR = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")


def open_model(model_file: str, more: bytes = b"") -> Any:
    """Load a `.model` file with `more` appended to its bytes. Raises TokenizerError for any other file."""
    from sentencepiece import SentencePieceProcessor

    content = Path(model_file).read_bytes()
    if not content:
        raise TokenizerError(f"{model_file} is empty, not a sentencepiece model")
    try:
        return SentencePieceProcessor(model_proto=content + more)
    except (RuntimeError, OSError, TypeError):
        raise TokenizerError(f"{model_file} is not a sentencepiece model") from None


class SentencePieceTokenizer(Tokenizer):
    """Tokenizer in a sentencepiece `.model`; `eod` is `<eod>`, or `</s>` if the model has no `<eod>`.

    Models trained by tools/train_tokenizer.py are lossless; others may normalise the text. With a
    tokenizer_config.json in the same folder, the ids equal those of transformers: tokenizer_config.json decides how a
    text begins and ends. settings: content of tokenizer_config.json, {} if it is missing. facts: piece types, algorithm
    and normalisation of the `.model`. Raises TokenizerError for added tokens that the model lacks.
    """

    name = "sentencepiece"

    def __init__(self, model_file: str) -> None:
        self._sp, self._file = open_model(model_file), model_file
        self.vocab_size = self._sp.vocab_size()
        content = Path(model_file).read_bytes()
        self.facts = read_facts(content, model_file)
        eod = self._piece(EOD)
        self.eod = self._sp.eos_id() if eod is None else eod
        self.settings = settings_beside(Path(model_file))
        bare = self.start, self.eod
        self._apply_settings(Path(model_file))
        if self.eod < 0:
            raise TokenizerError(f"{model_file} has no end-of-document token, neither {EOD} nor </s>")
        # A literal U+2581 in a text would be decoded as a space, so it is encoded as byte tokens. transformers'
        # LlamaTokenizer encodes it as a space, so models with this class do the same.
        spelled = [self._sp.piece_to_id(byte_piece(b)) for b in MARK.encode()]
        has_bytes = self._sp.is_byte(spelled[0])
        self._mark = np.array(spelled if has_bytes and not self.is_llama else [], dtype=np.int32)
        others = [] if (self.start, self.eod) == bare else [f"from {self.start} to {self.eod}"]
        others += self._llama_differences(has_bytes) if self.is_llama else []
        self.fingerprint = (
            fingerprint(", ".join([self.name, *others]), content) if others else hashlib.sha256(content).hexdigest()
        )
        self.specials = {
            self._sp.id_to_piece(i): i
            for i in range(self.vocab_size)
            if self._sp.is_control(i) or self._sp.is_unknown(i)
        }
        # mT5's sentinels are ordinary pieces that begin with U+2581, which stands for a space.
        for i in itertools.takewhile(lambda i: self._piece(f"{MARK}<extra_id_{i}>") is not None, itertools.count()):
            self.specials[f"<extra_id_{i}>"] = self._sp.piece_to_id(f"{MARK}<extra_id_{i}>")

    @property
    def is_llama(self) -> bool:
        """True if the ids follow transformers' LlamaTokenizer."""
        return str(self.settings.get("tokenizer_class")).removesuffix("Fast") in UNCLEAR

    def _llama_differences(self, has_bytes: bool) -> list[str]:
        """Return how tokenizer_config.json changes the ids of the `.model`, as parts of the fingerprint."""
        ways = ["marks of spaces are spaces"] if has_bytes else []
        ways += ["user-defined symbols cut a text"] if self._symbols else []
        if not self._prefixes:
            return [*ways, *(["no space in front"] if self._sp.normalize("a") != "a" else [])]
        return [*ways, "one space in front" if self.settings.get("legacy") else "one space in front, none inside"]

    def _apply_settings(self, path: Path) -> None:
        """Set `eod` and `start` from tokenizer_config.json."""
        refuse_missing_tokens(path, self._piece, SENTINEL.fullmatch)
        if self.settings.get("eos_token"):
            self.eod = self._named(path, "eos_token", "</s>")
        if self.settings.get("add_bos_token"):
            self.start = (self._named(path, "bos_token", "<s>"),)
        if self.is_llama:
            self._refuse_unclear(path)

    def _named(self, path: Path, key: str, usual: str) -> int:
        name = token_beside(path, key) or usual
        id_ = self._piece(name)
        if id_ is None:
            raise TokenizerError(f"{path.with_name(SETTINGS)}: {key} is {name!r}, which is not a token of {path.name}")
        return id_

    def _refuse_unclear(self, path: Path) -> None:
        """Raise TokenizerError for settings that transformers 4 and 5 read differently or that contradict the model."""
        nearby = path.with_name(SETTINGS)
        if self.settings.get("add_bos_token") is None:
            raise TokenizerError(
                f"{nearby} does not set add_bos_token, which defaults to true in transformers 4 and to false in 5; "
                f"set it to true or false there (Llama, Llama 2 and Mistral were trained with true)"
            )
        if self._prefixes and self._sp.normalize("a") == "a":
            raise TokenizerError(
                f"add_prefix_space is true in {nearby} (or by default), but {path.name} prepends no space to a text; "
                f"set add_prefix_space to false there"
            )

    @property
    def _prefixes(self) -> bool:
        """True if a LlamaTokenizer prepends a space to a text: add_prefix_space is true or not set."""
        said = self.settings.get("add_prefix_space")
        return said is None or bool(said)

    @property
    def marks(self) -> dict[str, int]:
        return {**self.specials, **self._defined}

    @functools.cached_property
    def _defined(self) -> dict[str, int]:
        """User-defined symbols that look like `<name>`, as name -> id; sentencepiece matches them before others."""
        pieces = {self._sp.id_to_piece(i): i for i in self.facts.of_type(USER_DEFINED)}
        return {piece: i for piece, i in pieces.items() if re.fullmatch(r"<\S+>", piece) and piece not in self.specials}

    @functools.cached_property
    def _bare(self) -> Any:
        """A processor for this model that prepends no space to a text."""
        return open_model(self._file, NO_PREFIX)

    def _piece(self, name: str) -> int | None:
        id_: int = self._sp.piece_to_id(name)
        return id_ if self._sp.id_to_piece(id_) == name else None

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0].tolist()  # type: ignore[no-any-return]

    def encode_inside(self, text: str) -> list[int]:
        """Return the ids of text after a special token; a LlamaTokenizer prepends a space only with `legacy` set."""
        if self.is_llama and not self.settings.get("legacy"):
            return self._bare.encode(text)  # type: ignore[no-any-return]
        return self.encode(text)

    def _is_bare(self, text: str) -> bool:
        """Return whether a LlamaTokenizer encodes this text without a prepended space.

        transformers 5 prepends no space to a text that begins with a space, whereas sentencepiece always does.
        """
        return not self._prefixes or text.startswith((" ", MARK))

    def encode_content(self, text: str, inside: bool = False) -> list[int]:
        if not self._defined:
            return super().encode_content(text, inside)
        cuts = [0, *(name.start() for name in split_name_pattern(self._defined).finditer(text)), len(text)]
        ids = super().encode_content(text[: cuts[1]], inside)
        for begin, end in itertools.pairwise(cuts[1:]):
            ids += self._bare.encode(text[begin:end])
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        found: list[NDArray[np.int32]] = self._sp.encode(list(texts), num_threads=1, return_type="numpy")
        if self.is_llama:
            return [
                self._encode_as_llama(text) if self._symbols or self._is_bare(text) else ids
                for text, ids in zip(texts, found, strict=True)
            ]
        if len(self._mark):
            for i, text in enumerate(texts):
                if MARK in text:
                    found[i] = self._encode_marked(text)
        return found

    @functools.cached_property
    def _symbols(self) -> dict[str, int]:
        """User-defined symbols that transformers splits off before it prepends spaces to the other parts."""
        pieces = {self._sp.id_to_piece(i): i for i in self.facts.of_type(USER_DEFINED)}
        return {piece: i for piece, i in pieces.items() if MARK not in piece}

    def _encode_as_llama(self, text: str) -> NDArray[np.int32]:
        found: list[NDArray[np.int32]] = []
        at = 0
        for part in any_of(self._symbols).split(text):
            if part in self._symbols:
                found.append(np.array([self._symbols[part]], dtype=np.int32))
            elif part:
                bare = self._is_bare(part) or (at > 0 and not self.settings.get("legacy"))
                found.append((self._bare if bare else self._sp).encode(part, return_type="numpy"))
            at += len(part)
        return np.concatenate(found) if found else np.array([], dtype=np.int32)

    def _encode_marked(self, text: str) -> NDArray[np.int32]:
        parts = [part for part in re.split(f"({MARK})", text) if part]
        return np.concatenate(
            [self._mark if part == MARK else self._sp.encode(part, return_type="numpy") for part in parts]
        )

    def decode(self, ids: Sequence[int]) -> str:
        model = self._bare if self.is_llama and not self._prefixes else self._sp
        return model.decode([int(i) for i in ids if i != self.eod])  # type: ignore[no-any-return]
