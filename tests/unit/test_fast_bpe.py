"""Large texts are encoded by tiktoken where it gives the ids of tokenizers, and by tokenizers where it may not."""

import importlib.util
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from megatron.tokenizer import fast_bpe, load_tokenizer
from megatron.tokenizer.fast_bpe import CHARACTERS, BatchEncoder, FastBpe, NotPlainError, slow_reason

tiktoken = pytest.importorskip("tiktoken")

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    "gpt2": None,
    "llama3": CONTRACTIONS + REST,
    "qwen2": CONTRACTIONS + REST.replace("{1,3}", ""),
}
TEXTS = [
    "春眠不觉晓，处处闻啼鸟。夜来风雨声，花落知多少。",
    "The ship's crew didn't know they'd SAIL; 1234567 times,   and\n\n\tthen   \r\n no more.  ",
    "don'ſ IT'S we'K e\u0301 Ⅷ ½ ٣٤ ４２ \u00a0\u3000\u2028x\x85y\x1cz 👩‍👩‍👧 🇨🇳 𠮷野家 \U000105c0 \u180e",
    "<|endoftext|> <|im_start|>user <tool> </s> aaaaaaaaaaaaaaaaaaaaaaaa    a     ",
    "def f(x):\n    return {'a': x ** 2, \"b\": [1, 2]}\n" * 3,
    "",
    " ",
    "\n",
    "가나다 한국어 ﬁ ǅ ß İ i̇ ك ॐ ก็",
    "ab" * 3000 + " " * 3000 + "，" * 3000,
]


def trained(pattern: str | None, change: Callable[[dict[str, Any]], None] = lambda description: None) -> Tokenizer:
    """Return a byte-level BPE tokenizer with a pattern of PATTERNS; `change` changes its tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    by_byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    parts = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*parts, by_byte]) if parts else by_byte
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    description = json.loads(tokenizer.to_str())
    change(description)
    changed = Tokenizer.from_str(json.dumps(description))
    changed.encode_special_tokens = True
    return changed


def slow_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


@pytest.fixture(scope="module", params=PATTERNS)
def pair(request: pytest.FixtureRequest) -> tuple[Tokenizer, FastBpe]:
    tokenizer = trained(PATTERNS[request.param])
    return tokenizer, FastBpe(tokenizer)


@pytest.mark.parametrize("text", [*TEXTS, CHARACTERS])
def test_ids_are_those_of_tokenizers(pair: tuple[Tokenizer, FastBpe], text: str) -> None:
    tokenizer, fast = pair
    found = fast.encode(text)
    assert found is not None and found.dtype == np.int32
    assert found.tolist() == slow_ids(tokenizer, text)


@settings(max_examples=150, deadline=None)
@given(st.text() | st.text(alphabet=" \n\r\t'sStTlL1٣aé中，😀"))
def test_ids_of_any_text_are_those_of_tokenizers(pair: tuple[Tokenizer, FastBpe], text: str) -> None:
    tokenizer, fast = pair
    found = fast.encode(text)
    assert found is not None and found.tolist() == slow_ids(tokenizer, text)


def test_words_that_are_tokens_need_no_merges() -> None:
    """Llama 3 sets ignore_merges, and all pairs that make a token are merges of it."""

    def change(description: dict[str, Any]) -> None:
        model = description["model"]
        model["ignore_merges"] = True
        merges = []
        for left, right in model["merges"]:
            whole = left + right
            for cut in range(1, len(whole)):
                if whole[:cut] in model["vocab"] and whole[cut:] in model["vocab"]:
                    merges.append([whole[:cut], whole[cut:]])
        model["merges"] = merges

    tokenizer = trained(PATTERNS["llama3"], change)
    fast = FastBpe(tokenizer)
    for text in TEXTS:
        found = fast.encode(text)
        assert found is not None and found.tolist() == slow_ids(tokenizer, text)


def test_texts_that_tiktoken_cannot_encode_are_left() -> None:
    tokenizer = trained(PATTERNS["qwen2"])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    fast = FastBpe(tokenizer)
    composed = fast.encode("Café 春")
    assert composed is not None and composed.tolist() == slow_ids(tokenizer, "Café 春")
    assert fast.encode("Cafe\u0301 春") is None  # its normalizer joins the two characters
    assert fast.encode("a\U000e01ffb") is None  # Python has no character there
    assert fast.encode("a <tool> b") is None
    assert fast.encode("a \ud83d b") is None
    matches_letters_only = trained(r"\p{L}+")
    assert FastBpe(matches_letters_only).encode("ab c") is None


def _set(*path: str) -> Callable[[dict[str, Any]], None]:
    *keys, value = path

    def change(description: dict[str, Any]) -> None:
        place = description
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = json.loads(value)

    return change


def _swap_merges(description: dict[str, Any]) -> None:
    description["model"]["merges"].reverse()


def _add_token_without_merge(description: dict[str, Any]) -> None:
    description["model"]["vocab"]["qxz"] = len(description["model"]["vocab"])
    description["model"]["ignore_merges"] = True


CHANGES = [
    _set("normalizer", '{"type": "NFKC"}'),
    _set("normalizer", '{"type": "Lowercase"}'),
    _set("model", "dropout", "0.1"),
    _set("pre_tokenizer", "add_prefix_space", "true"),
    _set("pre_tokenizer", "use_regex", "false"),
    _set("pre_tokenizer", '{"type": "Whitespace"}'),
    _swap_merges,
    _add_token_without_merge,
]


@pytest.mark.parametrize("change", CHANGES)
def test_other_tokenizers_are_refused(change: Callable[[dict[str, Any]], None]) -> None:
    with pytest.raises(NotPlainError):
        FastBpe(trained(None, change))


@pytest.mark.parametrize("pattern", [r"\p{N}{1,3}+|\P{N}", r"\h+|\H", r"[[:alpha:]]+|.", r"(?~ab)|."])
def test_patterns_that_mean_something_else_are_refused(pattern: str) -> None:
    with pytest.raises(NotPlainError):
        FastBpe(trained(pattern))


def test_disagreement_on_characters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release of tiktoken with older tables would take a new letter for punctuation."""

    class OlderEncoding(tiktoken.Encoding):  # type: ignore[misc,name-defined]
        def encode_ordinary(self, text: str) -> list[int]:
            ids: list[int] = super().encode_ordinary(text.replace("\u9fff", ""))
            return ids

    monkeypatch.setattr(tiktoken, "Encoding", OlderEncoding)
    with pytest.raises(NotPlainError):
        FastBpe(trained(None))


def test_batches_change_to_tiktoken_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_bpe, "SWITCH_AFTER", 2 * sum(map(len, TEXTS)))
    tokenizer = trained(None)
    slow_texts: list[str] = []

    def encode_batch(texts: Any) -> list[Any]:
        slow_texts.extend(texts)
        return [np.array(slow_ids(tokenizer, text), dtype=np.int32) for text in texts]

    encoder = BatchEncoder(tokenizer, encode_batch, re.compile("春"))
    expected = encode_batch(TEXTS)
    for slow_count in (len(TEXTS), len(TEXTS) + 1, 1):  # the second batch is also compared, without the slow text
        slow_texts.clear()
        found = encoder(TEXTS)
        assert all(map(np.array_equal, found, expected))
        assert len(slow_texts) == slow_count


def test_wrong_ids_of_the_first_texts_prevent_the_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_bpe, "SWITCH_AFTER", 1)
    monkeypatch.setattr(FastBpe, "encode", lambda self, text: np.zeros(3, np.int32))
    tokenizer = trained(None)
    expected = [np.array(slow_ids(tokenizer, text), dtype=np.int32) for text in TEXTS]
    encoder = BatchEncoder(tokenizer, lambda texts: expected, re.compile("(?!)"))
    for _ in range(3):
        assert all(map(np.array_equal, encoder(TEXTS), expected))


def test_without_tiktoken_the_reason_names_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokenizer.json"
    trained(None).save(str(path))
    assert load_tokenizer(str(path)).slow_reason() == ""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(fast_bpe, "SWITCH_AFTER", 1)
    tokenizer = load_tokenizer(str(path))
    assert "tiktoken" in tokenizer.slow_reason()
    for _ in range(2):
        (ids,) = tokenizer.encode_batch([TEXTS[0]])
        assert tokenizer.decode(ids.tolist()) == TEXTS[0]


def test_unigram_tokenizers_have_no_reason() -> None:
    assert slow_reason(Tokenizer(models.Unigram([("a", -1.0), ("<unk>", -9.0)], unk_id=1))) == ""
