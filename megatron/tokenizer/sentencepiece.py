"""Tokenizer for sentencepiece models (Kudo and Richardson 2018): BPE or unigram on raw text, with byte fallback."""

import functools
import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .base import (
    SENTINEL,
    IdArray,
    Tokenizer,
    TokenizerError,
    any_name_pattern,
    byte_piece,
    fingerprint,
    split_name_pattern,
)
from .model_proto import USER_DEFINED, read_facts
from .sibling_files import (
    SETTINGS,
    find_contradiction,
    read_token_name,
    read_tokenizer_config,
    require_added_tokens,
)

EOD = "<eod>"
MARK = "\u2581"  # represents a space in sentencepiece's tokens
SPACE = "\u2582"  # represents a space in CPM's tokens
NEWLINE = "\u2583"  # represents a newline in CPM's tokens


# Appending these bytes to a model sets normalizer_spec.add_dummy_prefix to false: in concatenated protobuf messages,
# the last value of a field counts.
NO_PREFIX = b"\x1a\x02\x18\x00"
# Tokenizer classes that need an explicit add_bos_token, because its default is true in transformers 4, but false in
# transformers 5.
LLAMA_CLASSES = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")


def open_model(model_file: str, appended: bytes = b"") -> Any:
    """Load a sentencepiece `.model` file and the bytes `appended`. Raises TokenizerError for any other file."""
    from sentencepiece import SentencePieceProcessor

    content = Path(model_file).read_bytes()
    if not content:
        raise TokenizerError(f"{model_file} is not a sentencepiece model: the file is empty")
    try:
        return SentencePieceProcessor(model_proto=content + appended)
    except (RuntimeError, OSError, TypeError):
        raise TokenizerError(f"{model_file} is not a sentencepiece model") from None


def is_cpm_model(path: Path) -> bool:
    """Return True if a sentencepiece model contains U+2582 and U+2583, CPM's characters for space and newline.

    A model with a piece for "\\n" is not CPM's: these characters may also occur in the text of other models.
    """
    model = open_model(str(path))
    ids = model.piece_to_id([SPACE, NEWLINE, "\n"])
    return [i == model.unk_id() for i in ids] == [False, False, True]


class SentencePieceTokenizer(Tokenizer):
    """Tokenizer that is defined by a sentencepiece `.model` file.

    `eod` is the id of `<eod>`, or of `</s>` if the model has no `<eod>`. Models from tools/train_tokenizer.py are
    lossless; other models may normalise the text. A tokenizer_config.json in the same folder may set `eod` and `start`.
    With such a file, the ids equal those of transformers.
    settings: content of tokenizer_config.json, or {} without this file. facts: piece types, algorithm and normalisation
    of the `.model`. Raises TokenizerError if the model lacks an added token.
    """

    name = "sentencepiece"

    def __init__(self, model_file: str) -> None:
        self._sp = open_model(model_file)
        self._file = model_file
        path = Path(model_file)
        self.vocab_size = self._sp.vocab_size()
        content = path.read_bytes()
        self.facts = read_facts(content, model_file)
        eod = self._find_id(EOD)
        self.eod = self._sp.eos_id() if eod is None else eod  # eos_id() is -1 for a model without </s>
        self.settings = read_tokenizer_config(path)
        # Those of the `.model` alone, which tokenizer_config.json may change.
        file_defaults = (self.start, self.eod)
        self._apply_settings(path)
        if self.eod < 0:
            raise TokenizerError(f"{model_file} has no end-of-document token, neither {EOD} nor </s>")
        # A literal U+2581 in a text is encoded as byte tokens, because the token U+2581 would be decoded as a space.
        # With the class LlamaTokenizer, it is encoded as a space, as in transformers.
        self._mark_ids = [self._sp.piece_to_id(byte_piece(b)) for b in MARK.encode()]
        has_bytes = self._sp.is_byte(self._mark_ids[0])
        if not has_bytes or self.is_llama:
            self._mark_ids = []
        # The fingerprint includes everything by which the ids differ from those of the `.model` alone.
        differences = []
        if (self.start, self.eod) != file_defaults:
            differences.append(f"from {self.start} to {self.eod}")
        if self.is_llama:
            differences += self._llama_differences(has_bytes)
        self.fingerprint = hashlib.sha256(content).hexdigest()
        if differences:
            self.fingerprint = fingerprint(", ".join([self.name, *differences]), content)
        self.specials = self._find_specials()
        self.contradiction = find_contradiction(self, path, self._find_id)

    def _find_specials(self) -> dict[str, int]:
        """Return name -> id of control tokens, <unk> and the sentinels of mT5."""
        specials = {}
        for i in range(self.vocab_size):
            if self._sp.is_control(i) or self._sp.is_unknown(i):
                specials[self._sp.id_to_piece(i)] = i
        # The sentinels of mT5 are ordinary pieces whose names begin with U+2581, the character for a space.
        number = 0
        while (sentinel := self._find_id(f"{MARK}<extra_id_{number}>")) is not None:
            specials[f"<extra_id_{number}>"] = sentinel
            number += 1
        return specials

    @property
    def is_llama(self) -> bool:
        """True if tokenizer_config.json names LlamaTokenizer or a class with the same encoding."""
        return str(self.settings.get("tokenizer_class")).removesuffix("Fast") in LLAMA_CLASSES

    def _llama_differences(self, has_bytes: bool) -> Iterator[str]:
        """Yield descriptions of how tokenizer_config.json makes ids differ from those of the `.model` alone.

        The fingerprint includes these descriptions.
        """
        if has_bytes:
            yield "marks of spaces are spaces"
        if self._splitting_symbols:
            yield "user-defined symbols cut a text"
        if self._adds_prefix_space:
            legacy = self.settings.get("legacy")
            yield "one space in front" if legacy else "one space in front, none inside"
        elif self._sp.normalize("a") != "a":  # the `.model` alone prepends a space
            yield "no space in front"

    def _apply_settings(self, path: Path) -> None:
        """Set `eod` and `start` from tokenizer_config.json."""
        require_added_tokens(path, self._find_id, known=SENTINEL.fullmatch)
        if self.settings.get("eos_token"):
            self.eod = self._id_from_settings(path, "eos_token", "</s>")
        default_name = "<s>" if self.is_llama else None  # as in transformers
        bos = read_token_name(path, "bos_token") or default_name
        if bos is not None:
            self.bos = self._find_id(bos)
        if self.settings.get("add_bos_token"):
            self.start = (self._id_from_settings(path, "bos_token", "<s>"),)
        if self.is_llama:
            self._check_settings(path)

    def _id_from_settings(self, path: Path, key: str, default_name: str) -> int:
        name = read_token_name(path, key) or default_name
        id_ = self._find_id(name)
        if id_ is None:
            raise TokenizerError(f"{path.with_name(SETTINGS)}: {key} is {name!r}, which is not a token of {path.name}")
        return id_

    def _check_settings(self, path: Path) -> None:
        """Raise TokenizerError if tokenizer_config.json is ambiguous or contradicts the model.

        Ambiguous settings are those that transformers 4 and 5 interpret differently.
        """
        nearby = path.with_name(SETTINGS)
        if self.settings.get("add_bos_token") is None:
            raise TokenizerError(
                f"{nearby} does not set add_bos_token, whose default is true in transformers 4 and false in "
                f"transformers 5; set it to true or false there (Llama, Llama 2 and Mistral were trained with true)"
            )
        if self._adds_prefix_space and self._sp.normalize("a") == "a":
            raise TokenizerError(
                f"add_prefix_space is true in {nearby} (or by default), but {path.name} prepends no space to a text; "
                f"set add_prefix_space to false there"
            )

    @property
    def _adds_prefix_space(self) -> bool:
        """True if add_prefix_space is true or not set, so that a LlamaTokenizer prepends a space to a text."""
        value = self.settings.get("add_prefix_space")
        return value is None or bool(value)

    @property
    def marks(self) -> dict[str, int]:
        return {**self.specials, **self._name_symbols}

    @functools.cached_property
    def _name_symbols(self) -> dict[str, int]:
        """User-defined symbols that look like `<name>`, as name -> id.

        sentencepiece matches user-defined symbols before other pieces.
        """
        pieces = self._user_defined().items()
        return {piece: i for piece, i in pieces if re.fullmatch(r"<\S+>", piece) and piece not in self.specials}

    def _user_defined(self) -> dict[str, int]:
        return {self._sp.id_to_piece(i): i for i in self.facts.ids_of_type(USER_DEFINED)}

    @functools.cached_property
    def _no_prefix_model(self) -> Any:
        """SentencePieceProcessor for this model that prepends no space to a text."""
        return open_model(self._file, NO_PREFIX)

    def _find_id(self, name: str) -> int | None:
        """Return the id of a token, or None if there is none: the model then gives the id of <unk>."""
        id_: int = self._sp.piece_to_id(name)
        return id_ if self._sp.id_to_piece(id_) == name else None

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0].tolist()  # type: ignore[no-any-return]

    def encode_inside(self, text: str) -> list[int]:
        """Return the ids of `text` if it follows a special token.

        After a special token, a LlamaTokenizer prepends a space only if tokenizer_config.json sets `legacy`.
        """
        if self.is_llama and not self.settings.get("legacy"):
            return self._no_prefix_model.encode(text)  # type: ignore[no-any-return]
        return self.encode(text)

    def _has_no_prefix(self, text: str) -> bool:
        """Return True if a LlamaTokenizer prepends no space to this text.

        transformers 5 prepends no space to a text that begins with a space. sentencepiece always prepends one.
        """
        return not self._adds_prefix_space or text.startswith((" ", MARK))

    def encode_content(self, text: str, inside: bool = False, after_text: bool = False) -> list[int]:
        # In a text, the names of user-defined symbols such as <name> are plain text, but the model would match them.
        # The pattern matches at a place inside each name. Cut there, so that no part contains a whole name.
        places = split_name_pattern(self._name_symbols).finditer(text)
        cuts = [0, *(place.start() for place in places), len(text)]
        first_part = text[: cuts[1]]  # the whole text if it contains no names
        model_adds_space = self._sp.normalize("a") != "a"
        # Only a part at the start of a text, or after a special token, may get the space that the model prepends.
        if after_text and model_adds_space:
            ids = self._encode_inside_text(first_part)
        else:
            ids = super().encode_content(first_part, inside)
        for begin, end in itertools.pairwise(cuts[1:]):
            ids += self._encode_inside_text(text[begin:end])
        return ids

    def _encode_inside_text(self, part: str) -> list[int]:
        """Return the ids of a part of a text that directly follows other text."""
        if self.is_llama or not self._mark_ids:
            return self._no_prefix_model.encode(part)  # type: ignore[no-any-return]
        return self._encode_marked(part, self._no_prefix_model).tolist()  # type: ignore[no-any-return]

    def encode_batch(self, texts: Sequence[str]) -> list[IdArray]:
        ids: list[IdArray] = self._sp.encode(list(texts), num_threads=1, return_type="numpy")
        encode = self._encode_as_llama if self.is_llama else self._encode_marked
        for i, text in enumerate(texts):
            if self._needs_own_encoding(text):  # few texts do, so all others are encoded by one call
                ids[i] = encode(text)
        return ids

    def _needs_own_encoding(self, text: str) -> bool:
        """Return whether the ids of `text` are not simply those of the SentencePiece model."""
        if self.is_llama:
            return bool(self._splitting_symbols) or self._has_no_prefix(text)
        return bool(self._mark_ids) and MARK in text

    @functools.cached_property
    def _splitting_symbols(self) -> dict[str, int]:
        """User-defined symbols, as name -> id.

        transformers splits a text at these symbols before it encodes each part with a prepended space.
        """
        return {piece: i for piece, i in self._user_defined().items() if MARK not in piece}

    def _encode_as_llama(self, text: str) -> IdArray:
        """Return the ids that a LlamaTokenizer of transformers gives: symbols split the text, and a space begins it."""
        symbols = self._splitting_symbols
        parts = filter(None, any_name_pattern(symbols).split(text))
        legacy = self.settings.get("legacy")
        part_ids: list[IdArray] = [np.array([], dtype=np.int32)]  # concatenate() needs at least one array
        for i, part in enumerate(parts):
            if part in symbols:
                part_ids.append(np.array([symbols[part]], dtype=np.int32))
                continue
            # A text begins with a space. Only a legacy tokenizer also prepends one to the part after a symbol.
            is_inside = i > 0 and not legacy
            needs_no_prefix = is_inside or self._has_no_prefix(part)
            model = self._no_prefix_model if needs_no_prefix else self._sp
            part_ids.append(model.encode(part, return_type="numpy"))
        return np.concatenate(part_ids)

    def _encode_marked(self, text: str, first_model: Any = None) -> IdArray:
        """Return the ids of a text with U+2581, which is encoded as `_mark_ids`.

        first_model: the model for the text before the first U+2581, by default the one that begins a text.
        """
        first, *others = text.split(MARK)
        ids = (first_model or self._sp).encode(first)
        for part in others:
            # A model that merges spaces drops one at the beginning of a text, unless it prepends one itself.
            keeps_space = part.startswith(" ") and self.facts.merges_spaces
            model = self._sp if keeps_space else self._no_prefix_model
            ids += self._mark_ids + model.encode(part)
        return np.array(ids, dtype=np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        has_no_prefix = self.is_llama and not self._adds_prefix_space
        model = self._no_prefix_model if has_no_prefix else self._sp
        size = self.vocab_size
        return model.decode([int(i) for i in ids if i != self.eod and i < size])  # type: ignore[no-any-return]
