"""Detection and loading of the tokenizer in a file or folder."""

import re
from importlib import import_module
from pathlib import Path

from .base import Tokenizer, TokenizerError
from .sibling_files import resolve_placeholder

KINDS = ("auto", "sentencepiece", "cpm", "cpm+rjieba", "cpm-vocab", "cpm-vocab+rjieba", "gpt2-bpe", "hf")
SAMPLE_TEXTS = (
    "春天来了，花都开了。老人坐在树下。", "The river runs slowly to the sea.", " a  b ", "2024年1,234.5元",
    "\n\n1234 \t", "é, Ａﬁ①",
)  # fmt: skip
# Kind of tokenizer -> its module, which is imported when the tokenizer is loaded, and its class.
_CLASSES = {
    "sentencepiece": ("sentencepiece", "SentencePieceTokenizer"), "cpm": ("cpm", "CpmTokenizer"),
    "cpm-vocab": ("cpm", "CpmVocabTokenizer"), "gpt2-bpe": ("hf", "Gpt2BpeTokenizer"), "hf": ("hf", "HFTokenizer"),
}  # fmt: skip
# CPM-1 has its model next to a vocab.json, which only lists the model's pieces, so the model comes first.
VOCAB_FILES = (
    "tokenizer.json", "chinese_vocab.model", "vocab.json", "gpt2-vocab.json", "vocab.txt", "tokenizer.model",
    "spiece.model",
)  # fmt: skip


def load_tokenizer(vocab_file: str, kind: str = "auto") -> Tokenizer:
    """Return the tokenizer in the file or folder `vocab_file`. Raises TokenizerError if there is none.

    kind: one of
    - `sentencepiece`: X.model
    - `cpm`: X.model, applied to words from jieba
    - `cpm-vocab`: X.txt or X.json, applied to words from jieba
    - `cpm+rjieba`, `cpm-vocab+rjieba`: with rjieba, which is faster than jieba but may split text differently
    - `gpt2-bpe`: vocab.json next to merges.txt, or Megatron-LM's gpt2-vocab.json next to gpt2-merges.txt
    - `hf`: tokenizer.json
    - `auto`: detected from the file
    """
    if kind not in KINDS:
        raise TokenizerError(f"--tokenizer-type {kind!r} must be one of {', '.join(KINDS)}")
    path = find_vocab_file(vocab_file)
    if kind == "auto":
        kind = _detect_kind(path)
    name, _, segmenter = kind.partition("+")  # `cpm+rjieba` names the segmenter
    module, class_name = _CLASSES[name]
    tokenizer_class = getattr(import_module(f".{module}", __package__), class_name)
    arguments = [str(path)]
    if module == "cpm":
        arguments.append(segmenter or "jieba")
    return tokenizer_class(*arguments)  # type: ignore[no-any-return]


def find_vocab_file(vocab_file: str) -> Path:
    """Return the path of a tokenizer's vocabulary file, given this file or its folder.

    Raises TokenizerError if there is no vocabulary file.
    """
    path = Path(vocab_file)
    if path.is_dir():
        files = [path / name for name in VOCAB_FILES if (path / name).is_file()]
        if not files:
            raise TokenizerError(
                f"the folder {vocab_file} has no vocabulary file: it contains none of {', '.join(VOCAB_FILES)}"
            )
        path = files[0]
    if path.name == "tokenizer.json" and path.is_file():  # it may be a placeholder that names another file
        path = resolve_placeholder(path) or path
    if not path.is_file():
        raise TokenizerError(f"there is no vocabulary file {vocab_file}; tools/train_tokenizer.py makes one")
    return path


def has_vocab_file(folder: Path) -> bool:
    """Return True if the folder contains a vocabulary file that `load_tokenizer` can find."""
    return any((folder / name).is_file() for name in VOCAB_FILES)


def check_same_ids(found: Tokenizer, expected: Tokenizer, problem: str) -> None:
    """Raise TokenizerError if vocabulary, `eod` or the ids of a sample text differ between the two tokenizers.

    problem: first words of the error message.
    """
    if (found.vocab_size, found.eod) != (expected.vocab_size, expected.eod):
        raise TokenizerError(
            f"{problem}: the former has {found.vocab_size} tokens and end-of-document id {found.eod}, "
            f"the latter {expected.vocab_size} and {expected.eod}"
        )
    found_specials = {i: name for name, i in found.specials.items()}
    expected_specials = {i: name for name, i in expected.specials.items()}
    for i in range(found.vocab_size):
        # Two tokens are equal if they decode to equal text or have equal names. Decoded text does not suffice: some
        # tokenizers decode a special token to its name, others to nothing, and sentencepiece decodes <unk> to "⁇".
        found_text = found.decode([i])
        expected_text = expected.decode([i])
        found_names = {found_text, found_specials.get(i)}
        expected_names = {expected_text, expected_specials.get(i)}
        common_names = found_names & expected_names
        if not common_names - {None}:  # None, which stands for no name of a special token, proves nothing
            raise TokenizerError(f"{problem}: token {i} is {found_text!r}, not {expected_text!r}")
    for text in SAMPLE_TEXTS:
        if found.encode(text) != expected.encode(text):
            raise TokenizerError(f"{problem}: the two tokenizers encode {text!r} to different ids")


def _detect_kind(path: Path) -> str:
    """Return the type of a tokenizer by its file name and, if that leaves a doubt, by its content."""
    if path.suffix == ".txt":
        return "cpm-vocab"
    if path.suffix != ".json":
        from .sentencepiece import is_cpm_model

        return "cpm" if is_cpm_model(path) else "sentencepiece"
    if path.name == "tokenizer.json":
        return "hf"
    from .hf import find_merges

    if find_merges(path).is_file():
        return "gpt2-bpe"
    # A tokenizer.json under another name has these keys and values; a CPM vocabulary maps tokens to ids.
    with open(path, "rb") as file:
        head = file.read(4096)
    return "hf" if re.search(rb'"(model|added_tokens)"\s*:\s*[{[]', head) else "cpm-vocab"
