"""Checks of the package tokenizers: its ids against byte-level BPE in plain Python with the same merges."""

import hashlib
import tempfile
from functools import cache
from itertools import pairwise
from pathlib import Path

import regex

from data_utils.tokenizer_training import train_byte_bpe
from megatron.tokenizer import load_tokenizer
from megatron.tokenizer.hf import import_tokenizers

from .with_sentencepiece import documents, lines

# SHA-256 of the merges that release 0.23.3 learns from the first documents of the bundled corpus
MERGES = "3055dfe5e8054550857a1c4719c7a10668c1fb6c12b9b394d57db308b791e23c"
WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")  # GPT-2's
MARKS = ("<|im_start|>", "<|im_end|>")


@cache
def letters() -> list[str]:
    """Return the characters by which GPT-2's vocabulary writes the 256 bytes."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in shown]
    found = {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}
    return [found[b] for b in range(256)]


def words_of_text(text: str) -> list[list[str]]:
    """Return the words into which GPT-2 cuts a text, each as the characters of its bytes."""
    return [[letters()[b] for b in word.encode()] for word in WORDS.findall(text)]


def tokens_of(word: list[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    """Merge the pair of the lowest rank, the first of several, until no pair has a rank."""
    pieces = list(word)
    while True:
        pairs = [(ranks[pair], i) for i, pair in enumerate(pairwise(pieces)) if pair in ranks]
        if not pairs:
            return pieces
        at = min(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def _merges(folder: str) -> dict[tuple[str, str], int]:
    """Train a vocabulary of 1,000 tokens into `folder`; return its merges and their ranks."""
    train_byte_bpe(documents(), folder, 1000, "gpt2-bpe")
    given = (Path(folder) / "merges.txt").read_text(encoding="utf-8").splitlines()[1:]
    return {(first, second): i for i, (first, second) in enumerate(map(str.split, given))}


def check_ids() -> None:
    """Compare ids of byte-level BPE with `tokens_of`, one text at a time and in a batch."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = _merges(folder)
        tokenizer = load_tokenizer(folder)
        vocabulary = import_tokenizers().models.BPE.read_file(f"{folder}/vocab.json", f"{folder}/merges.txt")[0]
    for line in lines():
        expected = [vocabulary[token] for word in words_of_text(line) for token in tokens_of(word, ranks)]
        if tokenizer.encode(line) != expected or tokenizer.encode_batch([line])[0].tolist() != expected:
            raise AssertionError(f"other ids for {line[:40]!r}")


def check_added_tokens() -> None:
    """A special token is one id where names count, and plain text elsewhere; the text around it keeps its ids."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/tokenizer.json"
        train_byte_bpe(documents(), path, 1000, "hf", MARKS)
        tokenizer = load_tokenizer(path)
        begin, end = (import_tokenizers().Tokenizer.from_file(path).token_to_id(mark) for mark in MARKS)
    text = "The river\nruns"
    inner = tokenizer.encode(text)
    named = f"{MARKS[0]}{text}{MARKS[1]}"
    if tokenizer.encode_names(named) != [begin, *inner, end]:
        raise AssertionError("other ids where names of added tokens count")
    plain = tokenizer.encode(named)
    if {begin, end} & set(plain) or tokenizer.decode(plain) != named:
        raise AssertionError("names of added tokens are not plain text in documents")


def check_vocabulary() -> None:
    """Compare the merges that are learnt from a fixed text with those of release 0.23.3."""
    with tempfile.TemporaryDirectory() as folder:
        merges = "\n".join(map(" ".join, _merges(folder)))
    digest = hashlib.sha256(merges.encode()).hexdigest()
    if digest != MERGES:
        raise AssertionError(f"the merges differ from those of 0.23.3 (SHA-256 {digest[:12]})")


CHECKS = {
    "tokenizers": {
        "ids of byte-level BPE": check_ids,
        "ids of added tokens": check_added_tokens,
        "vocabulary from a text": check_vocabulary,
    }
}
