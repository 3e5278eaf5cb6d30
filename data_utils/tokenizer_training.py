"""Training of vocabularies that are lossless for any Unicode text.

Training is deterministic: the same texts give the same file.
"""

import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from megatron.tokenizer.base import TokenizerError, byte_piece
from megatron.tokenizer.cpm import NEWLINE, SPACE, join_words
from megatron.tokenizer.hf import import_tokenizers
from megatron.tokenizer.model_proto import with_rounded_scores
from megatron.tokenizer.segment import SEPARATOR, segmenter
from megatron.tokenizer.sentencepiece import EOD

from .files import new_file

LONGEST_LINE = 16384  # characters; longer lines are split, as sentencepiece's trainer silently drops them
# Unigram scores are rounded to multiples of STEP. Some texts have several segmentations with the same score, such as
# "==" "=" and "=" "==" for "===". Without rounding, fp32 errors would decide which segmentation a library chooses. Sums
# of multiples of STEP are exact in fp32 up to 2**20, so libraries with sentencepiece's search algorithm all choose the
# same segmentation.
STEP = 1 / 16
BYTES = [byte_piece(b) for b in range(256)]


def _split_text(text: str, length: int) -> Iterator[str]:
    """Yield consecutive parts of a text of at most `length` characters."""
    for at in range(0, len(text), length):
        yield text[at : at + length]


def train_sentencepiece(
    texts: Iterable[str],
    model_file: str,
    vocab_size: int,
    model_type: str = "bpe",
    word_borders: str | None = None,
    specials: Sequence[str] = (),
) -> None:
    """Train a sentencepiece model on raw text and write it to `model_file`.

    Text is not normalised, spaces and newlines are kept, and characters outside the vocabulary become byte tokens.

    word_borders: a segmenter (`jieba`, `rjieba`) whose word boundaries no token may cross; the trained model does not
    need the segmenter. specials: names of special tokens besides <eod>.
    Raises TokenizerError if the text is too small for `vocab_size`.
    """
    lines: list[str] = []
    for text in texts:
        for line in text.split("\n"):
            lines += _split_text(line, LONGEST_LINE)
    training_lines = lines
    options: dict[str, Any] = {
        "add_dummy_prefix": False,
        "user_defined_symbols": ["\n"],
        "split_digits": True,
        "control_symbols": [EOD, *specials],
    }
    if word_borders:
        segment = segmenter(word_borders)
        # The ASCII unit separator marks word boundaries for the trainer, so it is removed from the text.
        options["pretokenization_delimiter"] = "\x1f"
        training_lines = []
        for line in lines:
            words = segment(line).replace("\x1f", "")
            training_lines.append(words.replace(SEPARATOR, "\x1f"))
    # `lines` have no delimiters, which must not count as characters of the text.
    content = _train_model(training_lines, lines, vocab_size, model_type, options)
    if model_type == "unigram":  # so that all libraries choose the same segmentation, see STEP
        content = with_rounded_scores(content, STEP)
    _write(model_file, content)


def train_cpm(texts: Iterable[str], model_file: str, vocab_size: int, model_type: str = "unigram") -> None:
    """Train a sentencepiece model with byte fallback on text that jieba splits into words, as in CPM-1."""
    segment = segmenter()
    lines = []
    for text in texts:
        # A part of n characters has at most n words, with n - 1 spaces between them, so a line of words has less than
        # LONGEST_LINE characters.
        for part in _split_text(text, LONGEST_LINE // 2):
            lines.append(join_words(segment(part)))
    options = {"required_chars": SPACE + NEWLINE, "split_digits": True, "control_symbols": [EOD]}
    _write(model_file, _train_model(lines, lines, vocab_size, model_type, options))


def _train_model(
    training_lines: Sequence[str], lines: Sequence[str], vocab_size: int, model_type: str, options: dict[str, Any]
) -> bytes:
    """Train a sentencepiece model and return its file's content.

    training_lines: text for the trainer, perhaps with delimiters between words. lines: text whose characters are
    counted to choose the character coverage. options: further options of the trainer.
    """
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=iter(training_lines),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=_character_coverage(lines, vocab_size),
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            max_sentence_length=8 * LONGEST_LINE,  # in bytes: up to 4 for a character, 1 for a delimiter
            bos_id=-1,  # -1: there is no such token
            eos_id=-1,
            pad_id=-1,
            unk_id=0,
            num_threads=1,
            minloglevel=2,
            **options,
        )
    except RuntimeError as error:
        raise TokenizerError(_training_error(vocab_size, str(error).strip().splitlines()[-1])) from None
    return model.getvalue()


def _training_error(vocab_size: int, error: str) -> str:
    """Convert an error of sentencepiece's trainer to a message that says how to change --vocab-size."""
    where = "--vocab-size, or VOCAB_SIZE= of run_*.sh,"
    needed = re.search(r"smaller than required_chars\. \d+ vs (\d+)", error)
    if needed:
        return f"{vocab_size} tokens are too few for the characters of this text; raise {where} to at least {needed[1]}"
    possible = re.search(r"set it to a value <= (\d+)", error)
    if possible:
        return f"this text is too small for {vocab_size} tokens; lower {where} to at most {possible[1]}"
    return f"cannot train {vocab_size} tokens on this text ({error[:200]}); change {where} or the text"


def _character_coverage(lines: Sequence[str], vocab_size: int) -> float:
    """Return sentencepiece's character_coverage: the share of the text's characters with a token of their own.

    Other characters become byte tokens. At most half of the vocabulary is used for single characters, because a
    script with thousands of characters would otherwise leave no tokens for words.
    """
    counts = Counter(chain.from_iterable(lines))
    # 256 tokens of the vocabulary are bytes.
    covered = sum(count for _, count in counts.most_common((vocab_size - 256) // 2))
    share = covered / max(counts.total(), 1)
    return max(0.98, min(0.9995, share))  # sentencepiece accepts no less than 0.98


def train_cpm_vocab(texts: Iterable[str], vocab_file: str, vocab_size: int) -> None:
    """Write a vocabulary file with one token per line.

    The tokens are <unk>, <eod>, a token for each byte, the most frequent characters, and jieba's most frequent words.
    """
    segment = segmenter()
    words: Counter[str] = Counter()
    for text in texts:
        # The segmenter writes SEPARATOR between words, so spaces and newlines of the text get characters of their own.
        marked = segment(text).replace(" ", SPACE).replace("\n", NEWLINE)
        words.update(marked.split(SEPARATOR))
    characters: Counter[str] = Counter()
    for word, count in words.items():
        for char in word:
            characters[char] += count
    fixed = ["<unk>", EOD, *BYTES, SPACE, NEWLINE]
    frequent = _by_count(characters, fixed)
    usable = _by_count(words, fixed)
    free_slots = vocab_size - len(fixed)
    possible = free_slots
    # A smaller vocabulary also has fewer characters that are no words, so one step down may not be enough.
    while (count := len({*frequent[: possible // 2], *usable})) < possible:
        possible = count
    if possible < free_slots:
        raise TokenizerError(
            f"this text is too small for {vocab_size} tokens; lower --vocab-size, or VOCAB_SIZE= of run_*.sh, "
            f"to at most {possible + len(fixed)}"
        )
    # Characters get at most half of the free slots; words fill the rest. A word of one character may already be chosen
    # as a character. The dict is an ordered set.
    chosen = dict.fromkeys([*frequent[: free_slots // 2], *usable])
    tokens = [*fixed, *chosen][:vocab_size]
    _write(vocab_file, ("\n".join(tokens) + "\n").encode())


def _by_count(counter: Counter[str], fixed: Sequence[str]) -> list[str]:
    """Return the keys that can be further tokens, the most frequent first, then in the order of their characters."""
    known = {"", *fixed}
    keys = sorted(counter, key=lambda key: (-counter[key], key))
    return [key for key in keys if key not in known and key.isprintable()]


def train_byte_bpe(texts: Iterable[str], output: str, vocab_size: int, kind: str, specials: Sequence[str] = ()) -> None:
    """Train byte-level BPE and write its files.

    output: for the kind `gpt2-bpe` a folder for vocab.json and merges.txt, for `hf` the path of a tokenizer.json.
    specials: names of special tokens besides the end-of-document token; only a tokenizer.json can mark them as
    special.
    """
    tokenizers = import_tokenizers()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    end = "<|endoftext|>"
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end, *specials],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() < vocab_size:
        raise TokenizerError(
            f"this text is too small for {vocab_size} tokens; lower --vocab-size, or VOCAB_SIZE= of run_*.sh, "
            f"to at most {tokenizer.get_vocab_size()}"
        )
    if kind == "hf":
        _write(output, tokenizer.to_str(pretty=True).encode())
        return
    model = json.loads(tokenizer.to_str())["model"]
    merges = list(map(" ".join, model["merges"]))
    _write(f"{output}/merges.txt", ("#version: 0.2\n" + "\n".join(merges) + "\n").encode())
    _write(f"{output}/vocab.json", json.dumps(model["vocab"], ensure_ascii=False).encode())


def _write(path: str, content: bytes) -> None:
    with new_file(path) as temporary:
        temporary.write_bytes(content)
