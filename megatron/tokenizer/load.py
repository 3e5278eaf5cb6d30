"""Detection and loading of the tokenizer in a file or folder."""

from importlib import import_module
from pathlib import Path

from .base import Tokenizer, TokenizerError
from .sibling_files import named_by_placeholder

KINDS = ("auto", "sentencepiece", "cpm", "cpm+rjieba", "cpm-vocab", "cpm-vocab+rjieba", "gpt2-bpe", "hf")
PROBES = (
    "春天来了，花都开了。老人坐在树下。", "The river runs slowly to the sea.", " a  b ", "2024年1,234.5元",
    "\n\n1234 \t", "é, Ａﬁ①",
)  # fmt: skip
# Kind of tokenizer -> its module, which is imported when the tokenizer is loaded, and its class.
_CLASSES = {
    "sentencepiece": ("sentencepiece", "SentencePieceTokenizer"), "cpm": ("cpm", "CpmTokenizer"),
    "cpm-vocab": ("cpm", "CpmVocabTokenizer"), "gpt2-bpe": ("hf", "Gpt2BpeTokenizer"), "hf": ("hf", "HFTokenizer"),
}  # fmt: skip
IN_FOLDER = ("tokenizer.json", "vocab.json", "gpt2-vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")


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
    path = file_of(vocab_file)
    name, _, segmenter = (_recognize(path) if kind == "auto" else kind).partition("+")
    module, kind_of = _CLASSES[name]
    tokenizer = getattr(import_module(f".{module}", __package__), kind_of)
    arguments = [segmenter or "jieba"] if module == "cpm" else []
    return tokenizer(str(path), *arguments)  # type: ignore[no-any-return]


def file_of(vocab_file: str) -> Path:
    """Return the path of a tokenizer's vocabulary file, given this file or its folder.

    Raises TokenizerError if there is no vocabulary file.
    """
    path = Path(vocab_file)
    if path.is_dir():
        files = [path / name for name in IN_FOLDER if (path / name).is_file()]
        if not files:
            raise TokenizerError(
                f"the folder {vocab_file} has no vocabulary file: it contains none of {', '.join(IN_FOLDER)}"
            )
        path = files[0]
    if path.name == IN_FOLDER[0] and path.is_file():
        path = named_by_placeholder(path) or path
    if not path.is_file():
        raise TokenizerError(f"there is no vocabulary file {vocab_file}; tools/train_tokenizer.py makes one")
    return path


def folder_has_one(folder: Path) -> bool:
    """Return True if the folder contains a vocabulary file that `load_tokenizer` can find."""
    return any((folder / name).is_file() for name in IN_FOLDER)


def refuse_other_ids(found: Tokenizer, expected: Tokenizer, what: str) -> None:
    """Raise TokenizerError if vocabulary, `eod` or the ids of a sample text differ between the two tokenizers.

    what: first words of the error message.
    """
    if (found.vocab_size, found.eod) != (expected.vocab_size, expected.eod):
        raise TokenizerError(
            f"{what}: the former has {found.vocab_size} tokens and end-of-document id {found.eod}, "
            f"the latter {expected.vocab_size} and {expected.eod}"
        )
    ours = {i: name for name, i in found.specials.items()}
    theirs = {i: name for name, i in expected.specials.items()}
    for i in range(found.vocab_size):
        # Two tokens are equal if they decode to equal text or have equal names. Decoded text does not suffice: some
        # tokenizers decode a special token to its name, others to nothing, and sentencepiece decodes <unk> to "⁇".
        written = {found.decode([i]), ours.get(i)}
        wanted = {expected.decode([i]), theirs.get(i)}
        if not (written & wanted) - {None}:
            raise TokenizerError(f"{what}: token {i} is {found.decode([i])!r}, not {expected.decode([i])!r}")
    for text in PROBES:
        if found.encode(text) != expected.encode(text):
            raise TokenizerError(f"{what}: the two tokenizers encode {text!r} to different ids")


def _recognize(path: Path) -> str:
    if path.suffix == ".txt":
        return "cpm-vocab"
    if path.suffix != ".json":
        from .sentencepiece import is_cpm_model

        return "cpm" if is_cpm_model(path) else "sentencepiece"
    if path.name == "tokenizer.json":
        return "hf"
    from .hf import merges_of

    if merges_of(path).is_file():
        return "gpt2-bpe"
    with open(path, "rb") as file:
        head = file.read(4096)
    return "hf" if b'"model"' in head or b'"added_tokens"' in head else "cpm-vocab"
