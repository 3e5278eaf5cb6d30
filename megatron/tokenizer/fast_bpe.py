"""Faster encoding for byte-level BPE, such as that of GPT-2, Qwen and Llama 3, by the package `tiktoken`.

tiktoken and `tokenizers` give the same ids for a tokenizer.json that is plain in some respects, which `FastBpe` checks:

- tiktoken merges the pair whose result has the lowest rank, whatever the two parts are, and a word that is itself a
  token becomes this token. So the order of the merges must be one of their results, each after its parts, and the
  merges must make each result from its own bytes.
- Both take the characters of \\p{L}, \\p{N} and \\s from tables of their own.
- tiktoken knows no normalizer and no added tokens, and drops characters that its pattern does not match.
"""

import functools
import importlib.util
import itertools
import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..packages import pip_install
from .base import any_name_pattern

Ids = list[NDArray[np.int32]]

SWITCH_AFTER = 4_000_000  # characters; the checks of FastBpe take as long as encoding a few millions
# The pattern that a ByteLevel pre-tokenizer uses without naming it
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CLASS = re.compile(r"\\[pP](\{\w+\})|\\([sSdDwW])")
# What the two packages may read differently: rare escapes and groups, brackets inside of brackets, and `{1,3}+`, which
# repeats a repetition in Oniguruma, the regular expressions of tokenizers, and is possessive in those of tiktoken
NOT_PORTABLE = re.compile(r"\\[^pPsSdDwWrnt\W]|\(\?(?!:|i:|[!=>]|<[!=])|\[[^\]]*\[|&&|\d\}\+")
# All characters: planes 4 to 13 have none, and those above 14 are for private use.
CHARACTERS = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x40000), *range(0xE0000, 0xE0200)]))


class NotPlainError(ValueError):
    """Error for a tokenizer that tiktoken cannot express; the message is the reason."""


def _require(condition: object, reason: str) -> None:
    if not condition:
        raise NotPlainError(reason)


@functools.cache
def byte_characters() -> dict[str, int]:
    """Return character -> byte, for the characters by which a byte-level vocabulary writes bytes.

    As in GPT-2, 188 bytes are shown as themselves, and the others, such as the space, as U+0100 and following.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in shown}
    for byte in range(256):
        if byte not in shown:
            # len(table) - len(shown) of these bytes are in the table already: 0 for the first, which gets U+0100 = 256.
            table[chr(256 + len(table) - len(shown))] = byte
    return table


def word_pattern(pre_tokenizer: Mapping[str, Any]) -> str:
    """Return the regular expression with which a pre-tokenizer splits text. Raises NotPlainError for other kinds.

    pre_tokenizer: a ByteLevel, or a sequence whose last part is a ByteLevel, as `_is_byte_bpe` ensures.
    """
    # `before` is [] for a single ByteLevel, and usually [Split] for a sequence, as in Llama 3.
    *before, last = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    _require(not last["add_prefix_space"], "its pre_tokenizer puts a space before a text")
    if not before:
        _require(last.get("use_regex", True), "its pre_tokenizer splits no words")
        return GPT2_PATTERN
    splitter = before[0]
    is_single = len(before) == 1 and splitter["type"] == "Split" and not last.get("use_regex", True)
    _require(is_single, "its pre_tokenizer splits words in several ways")
    keeps_matches = splitter["behavior"] == "Isolated" and not splitter["invert"]
    _require(keeps_matches, "its pre_tokenizer splits between the matches of its pattern")
    pattern: str = splitter["pattern"].get("Regex", "")
    is_portable = pattern and not NOT_PORTABLE.search(pattern)
    _require(is_portable, "the pattern of its pre_tokenizer may mean something else to tiktoken")
    return pattern


def _parts(merge: Any) -> list[str]:
    """Return the two parts of a merge, which old versions of tokenizers write as one string."""
    return merge.split(" ") if isinstance(merge, str) else merge  # type: ignore[no-any-return]


def merge_results(model: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tokens that the merges of a BPE model make, in the order of the merges.

    Raises NotPlainError if tiktoken, which knows only these results, may merge other pairs.
    """
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        _require(not model.get(key), f"its model has {key}")
    known = set(byte_characters())  # tokens that exist before the next merge
    _require(known <= model["vocab"].keys(), "its vocabulary lacks some bytes")
    merges = map(_parts, model["merges"])
    # A tokenizer that was converted from tiktoken names all pairs that make a token, one after the other, such as
    # (ab, c) and (a, bc). They are one group, whose key is the result "abc".
    for result, pairs in itertools.groupby(merges, key="".join):
        _require(result not in known, f"merges of other tokens lie between two that make {result!r}")
        is_made = any(left in known and right in known for left, right in pairs)
        _require(is_made, f"it merges parts of {result!r} before it makes them")
        yield result
        known.add(result)


def slow_reason(tokenizer: Any) -> str:
    """Return why a byte-level BPE tokenizer cannot be encoded by tiktoken, as far as a quick look shows.

    Returns "" if it can, and for tokenizers of other kinds.
    """
    description = json.loads(tokenizer.to_str())
    if not _is_byte_bpe(description):
        return ""
    try:
        _read(description)
    except NotPlainError as error:
        return str(error)
    return ""


def _is_byte_bpe(description: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer.json is a byte-level BPE, such as that of GPT-2."""
    pre_tokenizer = description["pre_tokenizer"] or {}
    last = pre_tokenizer.get("pretokenizers", [pre_tokenizer])[-1]
    return bool(description["model"]["type"] == "BPE" and last.get("type") == "ByteLevel")


def _read(description: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return (pattern, tokens in the order in which they are merged) of a tokenizer. Raises NotPlainError."""
    _require(importlib.util.find_spec("tiktoken"), f"tiktoken is not installed: {pip_install('tiktoken')}")
    _require(_is_byte_bpe(description), "it is not a byte-level BPE")
    _require(description["normalizer"] in (None, {"type": "NFC"}), "its normalizer is another one than NFC")
    tokens = [*byte_characters(), *merge_results(description["model"])]
    if description["model"].get("ignore_merges"):
        # Words that are in the vocabulary are not merged, so that no merge need make them.
        added = {token["content"] for token in description["added_tokens"]}
        unmade = description["model"]["vocab"].keys() - tokens - added
        _require(not unmade, "some of its tokens are made by no merge")
    return word_pattern(description["pre_tokenizer"]), tokens


def _check_classes(pattern: str) -> None:
    """Raise NotPlainError if tiktoken and tokenizers disagree on which characters are in a class of the pattern."""
    import tiktoken
    from tokenizers import Regex, pre_tokenizers

    # A vocabulary for tiktoken without merges: the ids of a text are the bytes of its UTF-8.
    ranks = {bytes([byte]): byte for byte in range(256)}
    names = {"(?i:[a-z])"}  # if case is ignored, some characters outside of ASCII are letters of this class, too
    # The pattern `\p{L}+|\S` has the classes \p{L} and \s: packages that agree on \s also agree on its complement \S.
    for category, letter in CLASS.findall(pattern):
        names.add(f"\\p{category}" if category else f"\\{letter.lower()}")
    for name in sorted(names):
        # Give both packages a text of all characters, of which they keep those of the class: with invert=True, Split
        # removes all text that does not match, and tiktoken always drops such text.
        splitter = pre_tokenizers.Split(Regex(f"{name}+"), behavior="removed", invert=True)
        expected = "".join(piece for piece, _ in splitter.pre_tokenize_str(CHARACTERS))
        encoding = tiktoken.Encoding(name, pat_str=f"{name}+", mergeable_ranks=ranks, special_tokens={})
        found = bytes(encoding.encode_ordinary(CHARACTERS)).decode("utf-8")
        _require(found == expected, f"tiktoken and tokenizers disagree on the characters of {name}")


@functools.cache
def _unassigned() -> re.Pattern[str]:
    """Return a pattern of the characters that Python's version of Unicode does not know.

    `tokenizers` may have a newer version, so Python cannot decide whether they are NFC.
    """
    unknown = [character for character in CHARACTERS if unicodedata.category(character) == "Cn"]
    return re.compile(f"[{''.join(unknown)}]")


class FastBpe:
    """Encoder with the ids of a byte-level BPE tokenizer of the package `tokenizers`; it runs in one thread.

    Raises NotPlainError, with the reason, if tiktoken is not installed or may give other ids.
    """

    def __init__(self, tokenizer: Any) -> None:
        description = json.loads(tokenizer.to_str())
        pattern, tokens = _read(description)
        import tiktoken

        _check_classes(pattern)
        for token in tokens:
            _require(len(tokenizer.model.tokenize(token)) == 1, f"its merges do not make its token {token!r}")
        self._needs_nfc = description["normalizer"] is not None
        # Special tokens in a text are plain text here. Other added tokens are not, so that tokenizers must find them.
        added = [token["content"] for token in description["added_tokens"] if not token["special"]]
        self._added = any_name_pattern(added)
        ranks = {}  # bytes of a token -> its rank, which tiktoken returns in place of an id
        for rank, token in enumerate(tokens):
            ranks[bytes(byte_characters()[character] for character in token)] = rank
        # Tables from ranks to ids, and to numbers of bytes: each character of a token stands for one byte.
        self._ids = np.array([description["model"]["vocab"][token] for token in tokens], dtype=np.int32)
        self._lengths = np.array(list(map(len, tokens)), dtype=np.int64)
        try:
            self._encoding = tiktoken.Encoding("bpe", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        except ValueError as error:
            raise NotPlainError(f"tiktoken cannot read the pattern of its pre_tokenizer ({error})") from None

    def encode(self, text: str) -> NDArray[np.int32] | None:
        """Return the ids of `text`, or None if only `tokenizers` can encode it. Special tokens are plain text."""
        if self._added.search(text):
            return None
        # tiktoken does not normalise. ASCII text is always NFC.
        if self._needs_nfc and not text.isascii():
            is_nfc = unicodedata.is_normalized("NFC", text)
            if not is_nfc or _unassigned().search(text):
                return None
        try:
            num_bytes = len(text.encode("utf-8"))
            ranks = self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:  # half of a surrogate pair
            return None
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # the regular expression took too many steps
                raise
            return None
        if self._lengths[ranks].sum() != num_bytes:  # the pattern does not match all characters
            return None
        return self._ids[ranks]


@dataclass
class BatchEncoder:
    """Encoder of batches by `tokenizers`; after SWITCH_AFTER characters, by tiktoken if the ids are the same.

    tokenizer: the tokenizer of the package `tokenizers`. encode_batch: encodes texts with it. slow_texts: pattern
    that occurs in texts which `encode_batch` cuts into parts.
    """

    tokenizer: Any
    encode_batch: Callable[[Sequence[str]], Ids]
    slow_texts: re.Pattern[str]
    _characters: int = 0  # number of characters encoded before the decision
    _is_decided: bool = False
    _fast_bpe: FastBpe | None = None

    def __call__(self, texts: Sequence[str]) -> Ids:
        if self._fast_bpe is not None:
            return self._encode_fast(self._fast_bpe, texts)
        ids = self.encode_batch(texts)
        self._characters += sum(map(len, texts))
        if not self._is_decided and self._characters >= SWITCH_AFTER:
            self._is_decided = True
            self._switch(texts, ids)
        return ids

    def _switch(self, texts: Sequence[str], expected: Ids) -> None:
        """Use tiktoken from now on, if it can encode for the tokenizer and gives the ids `expected` for `texts`."""
        try:
            fast_bpe = FastBpe(self.tokenizer)
        except NotPlainError:
            return
        if all(map(np.array_equal, self._encode_fast(fast_bpe, texts), expected)):
            self._fast_bpe = fast_bpe

    def _encode_fast(self, fast_bpe: FastBpe, texts: Sequence[str]) -> Ids:
        """Encode each text by tiktoken if it can, and all others together by `tokenizers`."""
        fast_ids: list[NDArray[np.int32] | None] = []  # None where only `tokenizers` can encode the text
        slow_texts = []
        for text in texts:
            ids = None if self.slow_texts.search(text) else fast_bpe.encode(text)
            fast_ids.append(ids)
            if ids is None:
                slow_texts.append(text)
        slow_ids = iter(self.encode_batch(slow_texts))  # in the order of the texts, so next() replaces each None
        return [next(slow_ids) if ids is None else ids for ids in fast_ids]
