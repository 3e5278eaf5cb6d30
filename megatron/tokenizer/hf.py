"""Byte-level BPE of GPT-2 (Radford et al. 2019), and whatever else a tokenizer.json of Hugging Face describes."""

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import Tokenizer, TokenizerError, fingerprint, read_object
from .sentinels import MARK as SENTINEL

SETTINGS = "tokenizer_config.json"
END_NAMES = ("<eod>", "<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[SEP]")


def library() -> Any:
    """The package tokenizers, imported when it is needed."""
    try:
        import tokenizers
    except ImportError:
        raise TokenizerError("this tokenizer needs the package tokenizers: pip install tokenizers") from None
    return tokenizers


class HFTokenizer(Tokenizer):
    """A `tokenizer.json`. Documents end with the eos_token of tokenizer_config.json next to it, or a token known for it.

    Names of special tokens in a text are text.
    """

    name = "hf"

    def __init__(self, path: str) -> None:
        content = Path(path).read_bytes()
        try:
            tokenizer = library().Tokenizer.from_str(content.decode("utf-8"))
        except TokenizerError:
            raise
        except Exception as error:  # the library raises no narrower class
            raise TokenizerError(f"{path} is not a tokenizer.json ({str(error)[:200]})") from None
        self._use(tokenizer, path, [_end_beside(Path(path)), *END_NAMES])
        _check_beside(Path(path), tokenizer)
        said = _settings_beside(Path(path)).get("add_bos_token")
        if said is not None and bool(said) != bool(self.start):
            raise TokenizerError(
                f"{Path(path).with_name(SETTINGS)} says add_bos_token {said}, but {Path(path).name} begins texts with "
                f"{list(self.start) or 'no token'}: say the same in both"
            )
        self.fingerprint = fingerprint(self.name, content)

    def _use(self, tokenizer: Any, path: str, ends: Sequence[str | None]) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1
        end = next((name for name in ends if name in vocabulary), None)
        if end is None:
            raise TokenizerError(f"{path} has no token to end a document with, such as {', '.join(END_NAMES)}")
        self.eod = vocabulary[end]
        self.specials = {
            token.content: i
            for i, token in tokenizer.get_added_tokens_decoder().items()
            if token.special or SENTINEL.fullmatch(token.content)
        }
        self.specials |= {end: self.eod}
        self._named: Any = None  # made when it is asked for
        self.start = _start_of(tokenizer)
        description = tokenizer.to_str()
        self._inside = _without_prefix(tokenizer, description, "first")
        self._bare = _without_prefix(tokenizer, description, "first", "always")
        # A unigram model holds the names of special tokens as pieces, and would find them in a text.
        found = [name for name, i in self.specials.items() if i in self._ids(tokenizer, name)]
        self._names = re.compile(
            "|".join(f"(?<={re.escape(n[0])}){re.escape(n[1:])}" for n in found if len(n) > 1) or "(?!)"
        )

    @staticmethod
    def _ids(tokenizer: Any, text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids  # type: ignore[no-any-return]

    def encode(self, text: str) -> list[int]:
        return self._pieces(text, self._tokenizer)

    def encode_inside(self, text: str) -> list[int]:
        return self._pieces(text, self._inside)

    def encode_names(self, text: str) -> list[int]:
        if self._named is None:
            tokenizers = library()
            self._named = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
            known = {token.content for token in self._named.get_added_tokens_decoder().values()}
            ends = [tokenizers.AddedToken(name, normalized=False) for name in self.specials if name not in known]
            self._named.add_special_tokens(ends)
            self._named.encode_special_tokens = False
        return self._ids(self._named, text)

    def _pieces(self, text: str, first: Any) -> list[int]:
        """Ids of a text, cut after the first character of whatever would be taken for a special token."""
        cuts = [0, *(name.start() for name in self._names.finditer(text)), len(text)]
        ids = self._ids(first, text[: cuts[1]])
        for begin, end in itertools.pairwise(cuts[1:]):
            ids += self._ids(self._bare, text[begin:end])
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [
            np.array(self.encode(text) if self._names.search(text) else each.ids, dtype=np.int32)
            for text, each in zip(texts, found, strict=True)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode([int(i) for i in ids if i != self.eod], skip_special_tokens=False)
        return text


def _start_of(tokenizer: Any) -> tuple[int, ...]:
    """What the post-processor puts in front of a text, if that is all that it adds: others (of BERT) mean the pair of both ends."""
    whole, bare = (tokenizer.encode("a", add_special_tokens=add).ids for add in (True, False))
    added = len(whole) - len(bare)
    return tuple(whole[:added]) if added > 0 and whole[added:] == bare else ()


def _settings_beside(path: Path) -> dict[str, Any]:
    """What tokenizer_config.json says, if there is one."""
    nearby = path.with_name(SETTINGS)
    return read_object(nearby) if nearby.is_file() else {}


def _end_beside(path: Path) -> str | None:
    """The eos_token of tokenizer_config.json. Raises TokenizerError for one that is no token."""
    token = _settings_beside(path).get("eos_token")
    name = token.get("content", token) if isinstance(token, dict) else token
    if name is not None and not isinstance(name, str):
        raise TokenizerError(f"{path.with_name(SETTINGS)}: eos_token is {name!r}, not a token")
    return name


def _check_beside(path: Path, tokenizer: Any) -> None:
    """Raise TokenizerError for what transformers takes from the files next to it, and the tokenizer does not have."""
    nearby, more = path.with_name(SETTINGS), path.with_name("added_tokens.json")
    settings = _settings_beside(path)
    added = {token: i for token, i in read_object(more).items()} if more.is_file() else {}
    listed = settings.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict) or not all(isinstance(token, dict) and i.isdigit() for i, token in listed.items()):
        raise TokenizerError(f"{nearby}: added_tokens_decoder must give a token for each id")
    added |= {token.get("content"): int(i) for i, token in listed.items()}
    for token, i in added.items():
        if tokenizer.token_to_id(str(token)) != i:
            raise TokenizerError(
                f"{path} has no token {token!r} of id {i}, which a file next to it names: save the tokenizer again, with "
                f"transformers' save_pretrained, as one tokenizer.json"
            )
    prefix = _prefixes(json.loads(tokenizer.to_str())["pre_tokenizer"])
    if prefix is not None and settings.get("add_prefix_space", prefix) != prefix:
        raise TokenizerError(
            f"{nearby} says add_prefix_space {settings['add_prefix_space']}, but {path.name} does not: say the same in both"
        )


def _prefixes(part: Any) -> bool | None:
    """Whether a description of byte-level words puts a space in front of a text; None for another kind of words."""
    for each in (part or {}).get("pretokenizers", [part]):
        if each and each["type"] == "ByteLevel":
            return bool(each["add_prefix_space"])
    return None


def _without_prefix(tokenizer: Any, description: str, *schemes: str) -> Any:
    """The same, but without the space that a `prepend_scheme` of these puts in front: for what goes on inside of a text."""
    inside = description
    for scheme in schemes:
        inside = inside.replace(f'"prepend_scheme":"{scheme}"', '"prepend_scheme":"never"')
    if inside == description:
        return tokenizer
    other = library().Tokenizer.from_str(inside)
    other.encode_special_tokens = True
    return other


def merges_of(path: Path) -> Path:
    """The merges that belong to a vocabulary: gpt2-merges.txt to gpt2-vocab.json, else merges.txt next to it."""
    own = path.with_name(path.name.replace("vocab.json", "merges.txt"))
    return own if own != path and own.is_file() else path.with_name("merges.txt")


class Gpt2BpeTokenizer(HFTokenizer):
    """GPT-2's `vocab.json`, with `merges.txt` next to it (see `merges_of`); the ids are those of Hugging Face's GPT2Tokenizer."""

    name = "gpt2-bpe"

    def __init__(self, path: str) -> None:
        tokenizers = library()
        merges = merges_of(Path(path))
        if not merges.is_file():
            raise TokenizerError(f"there is no {merges}, which belongs to {path}")
        try:
            tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(path, str(merges)))
        except Exception as error:  # the library raises no narrower class
            raise TokenizerError(f"{path} and {merges} are not GPT-2's files ({str(error)[:200]})") from None
        prefix = bool(_settings_beside(Path(path)).get("add_prefix_space"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=prefix)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        self._use(tokenizer, path, ("<eod>", "<|endoftext|>"))
        _check_beside(Path(path), tokenizer)
        kind = f"{self.name}, a space in front" if prefix else self.name
        self.fingerprint = fingerprint(kind, Path(path).read_bytes(), merges.read_bytes())
