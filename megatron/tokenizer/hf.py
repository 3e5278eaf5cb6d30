"""Tokenizers of Hugging Face: a tokenizer.json, or the files of GPT-2's byte-level BPE (Radford et al. 2019)."""

import contextlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..packages import pip_install
from .base import SENTINEL, Tokenizer, TokenizerError, fingerprint, split_name_pattern
from .fast_bpe import BatchEncoder, slow_reason
from .sentencepiece import LLAMA_CLASSES
from .sibling_files import (
    SETTINGS,
    find_contradiction,
    read_token_name,
    read_token_names,
    read_tokenizer_class,
    read_tokenizer_config,
    require_added_tokens,
)

TOKEN_LIKE = re.compile(r"<\S+>|\[\S+\]")
# Classes whose vocab.json and merges.txt belong to another pre-tokenizer or normalizer than GPT-2's
OTHER_CLASSES = ("Qwen2Tokenizer", "CLIPTokenizer", "GPTNeoXTokenizer")
NO_PREPEND = '"prepend_scheme":"never"'  # in the JSON of a tokenizer
PREPEND = re.compile(r'\{"type":"Prepend","prepend":"(?:[^"\\]|\\.)*"\}')  # a normalizer in this JSON
END_NAMES = ("<eod>", "<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[SEP]")


def import_tokenizers() -> Any:
    """Import and return the package `tokenizers`. Raises TokenizerError if the package is not installed."""
    try:
        import tokenizers
    except ImportError:
        raise TokenizerError(f"the package tokenizers is not installed: {pip_install('tokenizers')}") from None
    return tokenizers


@contextlib.contextmanager
def convert_panics(path: str) -> Iterator[None]:
    """Convert a panic of the Rust library `tokenizers` in this context into a TokenizerError.

    A panic is an exception that does not derive from Exception and cannot be pickled for another process.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(
            f"the tokenizer {path} cannot split this text: {str(error)[:200]}; its pre_tokenizer may contain a regular "
            f"expression that takes exponential time"
        ) from None


class HFTokenizer(Tokenizer):
    """Tokenizer that is defined by a `tokenizer.json`. Names of special tokens in a text are encoded as plain text.

    `eod` is the eos_token of tokenizer_config.json, or else the first token of END_NAMES that the vocabulary has.
    """

    name = "hf"

    def __init__(self, path: str) -> None:
        file = Path(path)
        content = file.read_bytes()
        try:
            with convert_panics(path):
                tokenizer = import_tokenizers().Tokenizer.from_str(content.decode("utf-8"))
        except TokenizerError:
            raise
        except Exception as error:  # tokenizers raises Exception itself, no subclass
            raise TokenizerError(f"{path} is not a tokenizer.json ({str(error)[:200]})") from None
        self._configure(tokenizer, path, [read_token_name(file, "eos_token"), *END_NAMES])
        add_bos_token = read_tokenizer_config(file).get("add_bos_token")
        if add_bos_token is not None and bool(add_bos_token) != bool(self.start):
            raise TokenizerError(
                f"{file.with_name(SETTINGS)} sets add_bos_token to {add_bos_token}, but {file.name} begins "
                f"a text with {list(self.start) or 'no token'}; make the two files agree"
            )
        self.fingerprint = fingerprint(self.name, content)

    def _configure(self, tokenizer: Any, path: str, end_names: Sequence[str | None]) -> None:
        """Set all attributes that follow from the tokenizer and the files beside it.

        end_names: names of the end-of-document token, of which the first that the vocabulary has counts.
        """
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self._path = path
        file = Path(path)
        vocabulary = tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1
        end = next((name for name in end_names if name in vocabulary), None)
        if end is None:
            raise TokenizerError(f"{path} has no end-of-document token; add one of {', '.join(END_NAMES)}")
        self.eod = vocabulary[end]
        self.bos = vocabulary.get(read_token_name(file, "bos_token"))
        self.specials, other_marks = _added_marks(tokenizer, vocabulary, file, end)
        self.specials[end] = self.eod  # `end` need not be an added token
        self._marks = {**self.specials, **other_marks}
        added_tokens = tokenizer.get_added_tokens_decoder().items()
        self.lstrip_ids = frozenset(i for i, token in added_tokens if token.lstrip)
        self.rstrip_ids = frozenset(i for i, token in added_tokens if token.rstrip)
        with convert_panics(path):
            self.start = _start_ids(tokenizer, self.eod)
            self._text_encoder = _PlainTextEncoder(tokenizer, self.specials)
            self.contradiction = self._find_contradiction(file)
        self._batch_encoder = BatchEncoder(tokenizer, self._encode_batch, self._text_encoder.split_pattern)
        _check_sibling_files(file, tokenizer)

    def _find_contradiction(self, path: Path) -> str:
        """Return how tokenizer_config.json contradicts the tokenizer, in words; "" if it does not."""
        settings = read_tokenizer_config(path)
        adds_space = settings.get("add_prefix_space")
        # Other classes of transformers do not apply add_prefix_space to such a file.
        is_applied = adds_space is not None and read_tokenizer_class(path) in LLAMA_CLASSES
        if is_applied and bool(adds_space) != _prepends_space(self._tokenizer):
            prepended = "no space" if adds_space else "a space"
            return (
                f"{path.with_name(SETTINGS)} sets add_prefix_space to {adds_space}, but {path.name} prepends "
                f"{prepended} to a text; make the two files agree"
            )
        if settings.get("add_bos_token") and not self.start:
            return (
                f"{path.with_name(SETTINGS)} sets add_bos_token to true, but {path.name} begins a text with no token; "
                f"set it to false, or save the tokenizer again as one tokenizer.json with transformers' "
                f"save_pretrained()"
            )
        return find_contradiction(self, path, self._tokenizer.token_to_id)

    @property
    def marks(self) -> dict[str, int]:
        return self._marks

    def encode(self, text: str) -> list[int]:
        with convert_panics(self._path):
            return self._text_encoder.ids(text, inside=False)

    def encode_inside(self, text: str) -> list[int]:
        with convert_panics(self._path):
            return self._text_encoder.ids(text, inside=True)

    def encode_content(self, text: str, inside: bool = False, after_text: bool = False) -> list[int]:
        with convert_panics(self._path):
            return self._content_encoder.ids(text, inside, after_text)

    def content_spans(self, text: str, inside: bool = False, after_text: bool = False) -> list[tuple[int, int, int]]:
        with convert_panics(self._path):
            return self._content_encoder.spans(text, inside, after_text)

    @cached_property
    def _content_encoder(self) -> "_PlainTextEncoder":
        """The encoder for `encode_content`, to which the names of all marks are plain text."""
        if self._marks == self.specials:
            return self._text_encoder
        return _PlainTextEncoder(_with_special_tokens(self._tokenizer, self._marks), self._marks)

    @cached_property
    def _names_tokenizer(self) -> Any:
        """A copy of the tokenizer that encodes the names of special tokens as these tokens."""
        tokenizers = import_tokenizers()
        names_tokenizer = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        known = {token.content for token in names_tokenizer.get_added_tokens_decoder().values()}
        missing = []
        for name in self.specials:
            if name not in known:  # special only to this project, such as the end-of-document token
                missing.append(tokenizers.AddedToken(name, normalized=False))
        names_tokenizer.add_special_tokens(missing)
        names_tokenizer.encode_special_tokens = False
        return names_tokenizer

    def encode_names(self, text: str) -> list[int]:
        with convert_panics(self._path):
            return _encode(self._names_tokenizer, text)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        return self._batch_encoder(texts)

    def _encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        with convert_panics(self._path):
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ids = []
        for text, encoding in zip(texts, encodings, strict=True):
            has_names = self._text_encoder.split_pattern.search(text)  # the batch encoder would recognise these names
            text_ids = self.encode(text) if has_names else encoding.ids
            ids.append(np.array(text_ids, dtype=np.int32))
        return ids

    def slow_reason(self) -> str:
        return slow_reason(self._tokenizer)

    def decode(self, ids: Sequence[int]) -> str:
        with convert_panics(self._path):
            text: str = self._tokenizer.decode([int(i) for i in ids if i != self.eod], skip_special_tokens=False)
        return text


def _added_marks(
    tokenizer: Any, vocabulary: Mapping[str, int], path: Path, end: str
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the special added tokens, and the others whose names chat templates may use (`marks`), as name -> id each.

    The end-of-document token `end` and T5's sentinels are special, even if the file does not mark them as such.
    The others look like <name> or [name], or tokenizer_config.json lists them, for example as eos_token. Further added
    tokens, such as the words and white space of CodeGen and Phi, are plain text.
    """
    listed_names = {name for name in read_token_names(path) if name.strip()}
    specials = {}
    others = {}
    for token in tokenizer.get_added_tokens_decoder().values():
        name = token.content
        if token.special or name == end or SENTINEL.fullmatch(name):
            specials[name] = vocabulary[name]
        elif name in listed_names or TOKEN_LIKE.fullmatch(name):
            others[name] = vocabulary[name]
    return specials, others


class _PlainTextEncoder:
    """Encoder that encodes the names of the tokens in `specials` as plain text, not as these tokens."""

    def __init__(self, tokenizer: Any, specials: Mapping[str, int]) -> None:
        # A tokenizer may add a space in two places: before a text, and before each part of it between special tokens.
        # At the start of a text, both apply. After a special token, only the latter does. After other text, such as
        # the rest of a cut name, neither does. So there is a copy of the tokenizer for each of the three places.
        description = tokenizer.to_str()
        self._at_start = tokenizer
        self._after_special = _without_prefix(tokenizer, description, is_after_text=False)
        self._after_text = _without_prefix(tokenizer, description, is_after_text=True)
        # Here, special tokens in a text are plain text. But a unigram model also has their names as ordinary pieces, so
        # it would find them. `split_pattern` matches such names, so that ids() can cut them into two texts.
        names_to_cut = [name for name, i in specials.items() if i in _encode(tokenizer, name)]
        self.split_pattern = split_name_pattern(names_to_cut)

    def ids(self, text: str, inside: bool, after_text: bool = False) -> list[int]:
        """Return the ids of `text`. The text is cut within names of special tokens, so that no name is recognised.

        inside: True if the text does not start a document. after_text: True if it follows other text directly.
        """
        result = []
        for part, tokenizer in self._parts(text, inside, after_text):
            result += _encode(tokenizer, part)
        return result

    def spans(self, text: str, inside: bool, after_text: bool) -> list[tuple[int, int, int]]:
        """Return (id, first character, end) of each token of `text`; the method `ids` gives the same ids.

        inside: True if the text does not start a document. after_text: True if it follows other text directly.
        """
        result = []
        offset = 0
        for part, tokenizer in self._parts(text, inside, after_text):
            encoding = tokenizer.encode(part, add_special_tokens=False)
            for token, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
                result.append((token, offset + begin, offset + end))
            offset += len(part)
        return result

    def _parts(self, text: str, inside: bool, after_text: bool) -> Iterator[tuple[str, Any]]:
        """Yield each part of `text` and the tokenizer that encodes it."""
        cuts = [0, *(name.start() for name in self.split_pattern.finditer(text)), len(text)]
        tokenizer = self._after_special if inside else self._at_start
        if after_text:
            tokenizer = self._after_text
        for begin, end in itertools.pairwise(cuts):
            yield text[begin:end], tokenizer
            tokenizer = self._after_text  # every part but the first follows other text


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids  # type: ignore[no-any-return]


def _with_special_tokens(tokenizer: Any, names: Mapping[str, int]) -> Any:
    """Return a copy of the tokenizer that encodes the names of special tokens and of `names` as plain text."""
    description = json.loads(tokenizer.to_str())
    for token in description["added_tokens"]:
        token["special"] = token["special"] or token["content"] in names
    other = import_tokenizers().Tokenizer.from_str(json.dumps(description))
    other.encode_special_tokens = True
    return other


def _start_ids(tokenizer: Any, eod: int) -> tuple[int, ...]:
    """Return the ids that the tokenizer's post-processor prepends to a text.

    The post-processor may append ids, too, such as the end token of a base model. They are ignored, as documents end
    with `eod` anyway.
    """
    plain_ids = _encode(tokenizer, "a")
    full_ids = tokenizer.encode("a", add_special_tokens=True).ids
    if full_ids[-1:] == [eod] and plain_ids[-1:] != [eod]:
        full_ids = full_ids[:-1]  # an appended eod: it would count as prepended in a tokenizer that has no ids for "a"
    # Llama 3 encodes "a" to [64], and with its post-processor to [128000, 64], so the result is (128000,).
    for num_added in range(len(full_ids) - len(plain_ids), -1, -1):  # from the end: a prepended id may be that of "a"
        if full_ids[num_added : num_added + len(plain_ids)] == plain_ids:
            return tuple(full_ids[:num_added])
    return ()


def _check_sibling_files(path: Path, tokenizer: Any) -> None:
    """Raise TokenizerError if tokenizer_config.json or added_tokens.json next to `path` contradict the tokenizer."""
    require_added_tokens(path, tokenizer.token_to_id)
    pre_tokenizer = json.loads(tokenizer.to_str())["pre_tokenizer"]
    adds_space = _adds_prefix_space(pre_tokenizer)
    configured = read_tokenizer_config(path).get("add_prefix_space")  # null leaves the choice to tokenizer.json
    are_both_set = adds_space is not None and configured is not None
    if are_both_set and configured != adds_space:
        raise TokenizerError(
            f"{path.with_name(SETTINGS)} sets add_prefix_space to {configured}, but {path.name} sets "
            f"it to {adds_space}; make the two files agree"
        )


def _prepends_space(tokenizer: Any) -> bool:
    """Return whether the normalizer or the pre-tokenizer prepends a space, or a character for it, to a text."""
    text = "a"
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    if tokenizer.pre_tokenizer is not None:
        text = tokenizer.pre_tokenizer.pre_tokenize_str(text)[0][0]
    return not text.startswith("a")


def _adds_prefix_space(part: Any) -> bool | None:
    """Return True if a byte-level pre-tokenizer prepends a space to a text, False if not, None for other kinds."""
    # `part` is None, a pre-tokenizer, or a sequence of several.
    for each in (part or {}).get("pretokenizers", [part]):
        if each and each["type"] == "ByteLevel":
            return bool(each["add_prefix_space"])
    return None


def _without_prefix(tokenizer: Any, description: str, is_after_text: bool) -> Any:
    """Return a copy of the tokenizer that prepends no space to a text which follows a special token, or other text.

    description: the tokenizer as JSON.
    """
    # to_str() writes JSON without white space, so the text of a setting is known exactly.
    without_space = description.replace('"prepend_scheme":"first"', NO_PREPEND)
    if is_after_text:
        without_space = without_space.replace('"prepend_scheme":"always"', NO_PREPEND)
        without_space = without_space.replace('"add_prefix_space":true', '"add_prefix_space":false')
        without_space = PREPEND.sub('{"type":"Sequence","normalizers":[]}', without_space)
    if without_space == description:
        return tokenizer
    other = import_tokenizers().Tokenizer.from_str(without_space)
    other.encode_special_tokens = True
    return other


def find_merges(path: Path) -> Path:
    """Return the path of the merges file of a vocabulary: gpt2-merges.txt for gpt2-vocab.json, else merges.txt."""
    prefixed = path.with_name(path.name.replace("vocab.json", "merges.txt"))
    if prefixed != path and prefixed.is_file():
        return prefixed
    return path.with_name("merges.txt")


class Gpt2BpeTokenizer(HFTokenizer):
    """GPT-2's tokenizer in `vocab.json` and `merges.txt`; the ids equal those of Hugging Face's GPT2Tokenizer."""

    name = "gpt2-bpe"

    def __init__(self, path: str) -> None:
        tokenizers = import_tokenizers()
        file = Path(path)
        merges = find_merges(file)
        named = read_tokenizer_class(file)
        if named in OTHER_CLASSES:
            raise TokenizerError(
                f"{path} belongs to a {named}, which splits text into other words than GPT-2's tokenizer; use a "
                f"tokenizer.json (transformers' save_pretrained() writes one)"
            )
        if not merges.is_file():
            raise TokenizerError(f"there is no {merges}; the vocabulary {path} needs this file")
        try:
            tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(path, str(merges)))
        except Exception as error:  # tokenizers raises Exception itself, no subclass
            raise TokenizerError(
                f"{path} and {merges} are not the vocabulary and merges of a GPT-2 tokenizer ({str(error)[:200]})"
            ) from None
        adds_space = bool(read_tokenizer_config(file).get("add_prefix_space"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=adds_space)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        self._configure(tokenizer, path, ["<eod>", "<|endoftext|>", read_token_name(file, "eos_token"), *END_NAMES])
        kind = f"{self.name}, a space in front" if adds_space else self.name
        self.fingerprint = fingerprint(kind, file.read_bytes(), merges.read_bytes())
