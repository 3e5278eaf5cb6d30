"""Settings of corpus, objective and samples; the other sections are in `sections.py`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .fields import ConfigError, Section, at_least, between, one_of, opt

OF_T5 = ("span-corruption", "prefix-lm")
OF_DECODERS = ("lm", "sft", "prefix-lm")


def objectives_of(family: str | None) -> tuple[str, ...]:
    """Return a family's objectives, the default first; a custom model (family None) has those of GPT-2 and Llama."""
    return OF_T5 if family == "t5" else OF_DECODERS


def prefix_of(word: str) -> str:
    """Return the prefix of the .bin/.idx pair that `word` names, by its prefix or by one of its files.

    `x`, `x.bin` and `x.idx` give `x`, unless a pair x.bin.bin and x.bin.idx exists.
    """
    path = Path(word)
    if path.suffix in (".bin", ".idx") and not Path(f"{word}.idx").exists():
        return word[: -len(path.suffix)]
    return word


def prefixes_of(words: Sequence[str]) -> tuple[str, ...]:
    """Return the prefixes that --data-path names, with their weights; two files of one pair (`data/x.*`) count once.

    A single word may itself be a list of weights and prefixes separated by spaces.
    """
    found: list[str] = []
    for i, word in enumerate(words):
        parts = word.split()
        if len(parts) > 1 and parts[0].replace(".", "", 1).isdecimal():
            found.append(" ".join(map(prefix_of, parts)))
        elif not (
            i and prefix_of(word) == found[-1] and {word, words[i - 1]} == {f"{found[-1]}.bin", f"{found[-1]}.idx"}
        ):
            found.append(prefix_of(word))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Settings of corpus, tokenizer and samples."""

    data_path: tuple[str, ...] | None = opt(
        None,
        "corpus: the prefix of the .bin/.idx pair that tools/preprocess_data.py wrote, or one of its files; "
        "several corpora with weights: 0.7 a 0.3 b",
    )
    train_data_path: tuple[str, ...] | None = opt(None, "corpora for training, instead of --data-path and --split")
    valid_data_path: tuple[str, ...] | None = opt(None, "corpora for validation, with --train-data-path")
    test_data_path: tuple[str, ...] | None = opt(None, "corpora for test, with --train-data-path")
    split: str = opt("949,50,1", "shares of the documents for training, validation and test")
    vocab_file: str | None = opt(None, "the tokenizer: a .model, .json or .txt file, or a folder that holds one")
    tokenizer_type: str = opt(
        "auto",
        "sentencepiece, cpm, cpm+rjieba, cpm-vocab, cpm-vocab+rjieba, gpt2-bpe or hf; auto decides by the file",
    )
    seq_length: int = opt(1024, "tokens of a training sample", at_least(1))
    enc_seq_length: int | None = opt(
        None, "T5: length of the encoder's sequence in tokens; --seq-length if not given", at_least(8), family=("t5",)
    )
    dec_seq_length: int | None = opt(
        None,
        "T5: maximum length of the decoder's sequence in tokens; if not given, the length that masked spans need",
        at_least(4),
        family=("t5",),
    )
    objective: str | None = opt(
        None,
        "training objective: lm (each next token; the default), sft (the answers of conversations) or prefix-lm "
        "(the text after a prefix, which attends in both directions; docs/objectives.md). T5: span-corruption (the "
        "default) or prefix-lm",
        one_of(*dict.fromkeys((*OF_DECODERS, *OF_T5))),
    )
    span_convention: str = opt(
        "t5",
        "T5: format of masked spans: t5, or cpm as in CPM-Pretrain (docs/t5.md)",
        one_of("t5", "cpm"),
        family=("t5",),
    )
    noise_density: float = opt(0.15, "T5: share of the tokens that are masked", between(0.01, 0.9), family=("t5",))
    mean_span_length: float = opt(3.0, "T5: mean number of tokens of a masked span", at_least(1), family=("t5",))
    num_sentinels: int = opt(
        100, "T5: sentinel tokens that replace masked spans, added to the vocabulary", at_least(1), family=("t5",)
    )
    fim_rate: float = opt(
        0.0,
        "with --objective lm: share of the documents that become fill-in-the-middle documents: their middle is moved "
        "to the end (docs/objectives.md)",
        between(0, 1),
    )
    fim_spm_rate: float = opt(
        0.5, "share of the fill-in-the-middle documents in the order suffix, prefix, middle", between(0, 1)
    )
    fim_tokens: tuple[str, ...] | None = opt(
        None, "special tokens of the tokenizer that mark prefix, middle and suffix, in this order"
    )
    reset_position_ids: bool = opt(False, "restart positions after each end-of-document token")
    reset_attention_mask: bool = opt(False, "attend within documents only")
    eod_mask_loss: bool = opt(False, "exclude the token after an end of document from the loss")
    num_workers: int = opt(0, "worker processes that read samples ahead; 0 reads in the training process", at_least(0))

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
            if given := getattr(self, name):
                object.__setattr__(self, name, prefixes_of(given))

    def _problems(self) -> Iterator[str]:
        separate = self.train_data_path or self.valid_data_path or self.test_data_path
        if separate and self.data_path:
            yield "--data-path is divided by --split; give it or --train-data-path, not both"
        if separate and not self.train_data_path:
            yield "--valid-data-path and --test-data-path need --train-data-path"

    @property
    def paths(self) -> tuple[str, ...] | dict[str, tuple[str, ...]]:
        """Corpora of --data-path, or a dict of corpora by split (train, valid, test).

        Raises ConfigError if no corpus is given.
        """
        if self.data_path:
            return self.data_path
        if not self.train_data_path:
            raise ConfigError("no corpus: give --data-path, the prefix that tools/preprocess_data.py wrote")
        return {
            "train": self.train_data_path,
            "valid": self.valid_data_path or (),
            "test": self.test_data_path or (),
        }
