"""Byte-level BPE of GPT-2 (Radford et al. 2019), and whatever else a tokenizer.json of Hugging Face describes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import Tokenizer, TokenizerError, fingerprint

END_NAMES = ("<eod>", "<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[SEP]")


def library() -> Any:
    """The package tokenizers, which is optional."""
    try:
        import tokenizers
    except ImportError:
        raise TokenizerError("this tokenizer needs the package tokenizers: pip install tokenizers") from None
    return tokenizers


class HFTokenizer(Tokenizer):
    """A `tokenizer.json`. Documents end with the eos_token of tokenizer_config.json beside it, or a token known for it.

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
        beside = Path(path).with_name("tokenizer_config.json")
        ends = list(END_NAMES)
        if beside.is_file():
            token = json.loads(beside.read_text(encoding="utf-8")).get("eos_token")
            ends.insert(0, token["content"] if isinstance(token, dict) else token)
        self._use(tokenizer, path, ends)
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
        self.specials = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self.specials |= {end: self.eod}

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids  # type: ignore[no-any-return]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, dtype=np.int32) for each in found]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode([int(i) for i in ids if i != self.eod], skip_special_tokens=False)
        return text


def merges_of(path: Path) -> Path:
    """The merges that belong to a vocabulary: gpt2-merges.txt to gpt2-vocab.json, else merges.txt beside it."""
    own = path.with_name(path.name.replace("vocab.json", "merges.txt"))
    return own if own != path and own.is_file() else path.with_name("merges.txt")


class Gpt2BpeTokenizer(HFTokenizer):
    """GPT-2's `vocab.json`, with `merges.txt` beside it (see `merges_of`); the ids are those of Hugging Face's GPT2Tokenizer."""

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
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        self._use(tokenizer, path, ("<eod>", "<|endoftext|>"))
        self.fingerprint = fingerprint(self.name, Path(path).read_bytes(), merges.read_bytes())
