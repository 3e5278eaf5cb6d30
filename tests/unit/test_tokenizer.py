from pathlib import Path

import pytest

from megatron.tokenizer import TokenizerError, load_tokenizer
from megatron.tokenizer.sentencepiece import train

TEXTS = [
    "你好，世界。",
    "  two spaces, a\ttab\nand a newline\n\n",
    "ＡＢＣ　全角 and half-width",
    "emoji 😀👩‍👩‍👧 and rare 𠮷 𪚥",
    "",
    " ",
    "\u0000\u0007\u200b",
    "naïve café — “quotes”",
    "<eod> is only text here",
]


@pytest.mark.parametrize("text", TEXTS, ids=repr)
def test_nothing_is_lost(vocab_file: str, text: str) -> None:
    tokenizer = load_tokenizer(vocab_file)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.eod not in ids


def test_batches_equal_single_texts(vocab_file: str) -> None:
    tokenizer = load_tokenizer(vocab_file)
    assert [ids.tolist() for ids in tokenizer.encode_batch(TEXTS)] == [tokenizer.encode(text) for text in TEXTS]


def test_training_is_reproducible_and_the_fingerprint_tells(tmp_path: Path) -> None:
    texts = ["春眠不觉晓，处处闻啼鸟。" * 3, "the quick brown fox jumps over the lazy dog " * 3]
    for name, size in (("a", 330), ("b", 330), ("c", 340)):
        train(texts, str(tmp_path / name), size)
    a, b, c = (load_tokenizer(str(tmp_path / name)) for name in "abc")
    assert a.fingerprint == b.fingerprint != c.fingerprint
    assert (a.vocab_size, c.vocab_size) == (330, 340)


def test_a_script_of_many_characters_fits_a_small_vocabulary(tmp_path: Path) -> None:
    texts = ["".join(chr(0x4E00 + 7 * i % 3000) for i in range(9000)) + "的一是" * 300000]
    train(texts, str(tmp_path / "m"), 600)
    assert load_tokenizer(str(tmp_path / "m")).decode(load_tokenizer(str(tmp_path / "m")).encode("龘的")) == "龘的"


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="there is no vocabulary file"):
        load_tokenizer(str(tmp_path / "none.model"))
    (tmp_path / "bad.model").write_bytes(b"not a model")
    with pytest.raises(TokenizerError, match="bad.model is not a sentencepiece model"):
        load_tokenizer(str(tmp_path / "bad.model"))
    with pytest.raises(TokenizerError, match="try a smaller --vocab-size"):
        train(["too short"], str(tmp_path / "m"), 5000)
    assert not (tmp_path / "m").exists()
