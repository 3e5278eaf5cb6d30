"""Settings of corpus, objective and samples; the other sections are in `sections.py`."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .data_stages import StagedCorpora, parse_stages, stages_as_json
from .fields import ConfigError, Section, at_least, between, one_of, opt, problems_where
from .model_settings import T5

T5_OBJECTIVES = ("span-corruption", "prefix-lm")
DECODER_OBJECTIVES = ("lm", "sft", "prefix-lm")
CORPUS_ENDINGS = (".bin", ".idx", ".json", ".orders")  # of the files and folders of a corpus
NAMED_SET = re.compile(r"([^\W\d_][\w.-]*)=(.+)")  # a word that names a data set: web=data/a


def objectives_of(family: str | None) -> tuple[str, ...]:
    """Return a family's objectives, the default first; a custom model (None) has the objectives of GPT-2 and Llama."""
    return T5_OBJECTIVES if family == "t5" else DECODER_OBJECTIVES


def is_corpus(prefix: str) -> bool:
    """Return whether a corpus with this prefix exists on this machine."""
    return os.path.exists(f"{prefix}.idx")


def corpus_prefix(word: str) -> str:
    """Return the prefix of the .bin/.idx pair that `word` names; `word` is the prefix or a path that belongs to it.

    `x`, `x.bin`, `x.idx` and the sidecar `x.json` all give `x`. But if x.bin.idx exists, `x.bin` is itself a prefix.
    """
    prefix, ending = os.path.splitext(word)
    is_file = ending in CORPUS_ENDINGS and not is_corpus(word)
    return prefix if is_file else word


def corpus_prefixes(words: Sequence[str]) -> tuple[str, ...]:
    """Return the prefixes and weights that the words after --data-path name.

    The files of a corpus (as in `data/x.*`) count as one prefix. A single word may contain several weights and
    prefixes, separated by spaces.
    """
    prefixes: list[str] = []
    previous_word = ""
    for word in words:
        prefix = renamed(word, corpus_prefix)
        # `data/x.idx` after `data/x.bin`: the first file has already added the prefix. But `data/x` after `data/x.bin`,
        # or the same word again, names the corpus twice.
        is_next_file = prefix in prefixes[-1:] and word != previous_word and prefix not in (word, previous_word)
        if not is_next_file:
            prefixes.append(prefix)
        previous_word = word
    return tuple(prefixes)


def renamed(word: str, change: Callable[[str], str]) -> str:
    """Return a word of --data-path, perhaps with a name or a quoted blend, with each prefix changed by `change`."""
    name = ""
    match = NAMED_SET.match(word)
    if match and not is_corpus(word):  # the prefix of a corpus may contain =
        name = f"{match[1]}="
        word = match[2]
    parts = [part if is_number(part) else change(part) for part in split_words(word)]
    return name + " ".join(parts)


def split_words(word: str) -> list[str]:
    """Split a quoted list such as "0.7 a 0.3 b" into its words; return a prefix that contains spaces unchanged."""
    parts = word.split()
    is_blend = len(parts) > 1 and is_number(parts[0]) and not is_corpus(corpus_prefix(word))
    return parts if is_blend else [word]


def is_number(word: str) -> bool:
    """Return whether a word is a number, such as a weight of --data-path. The word `nan` is none."""
    try:
        return float(word) == float(word)  # NaN differs from itself; the word may name a corpus
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Settings of corpus, tokenizer and samples."""

    data_path: tuple[str, ...] | None = opt(
        None,
        "corpus: the prefix of the .bin/.idx pair that tools/preprocess_data.py wrote, or one of the two files; "
        "several corpora are given with weights, e.g. 0.7 a 0.3 b. A prefix may be a URL of object storage such as s3://bucket/x",
    )
    data_stages: tuple[str, ...] | None = opt(
        None,
        'blend of the training data that changes during the run, e.g. "0: 0.8 a 0.2 b; 1M: 0.4 a 0.6 c": the numbers '
        'before the colons are consumed samples, or tokens as in "1G tokens: ..."; or a JSON file (docs/data.md). Each '
        "corpus is read on where earlier stages stopped",
    )
    train_data_path: tuple[str, ...] | None = opt(None, "corpora for training, instead of --data-path and --split")
    valid_data_path: tuple[str, ...] | None = opt(
        None,
        "corpora for validation; needs --train-data-path. Data sets with names, e.g. web=a books=b, are evaluated one "
        "by one",
    )
    test_data_path: tuple[str, ...] | None = opt(
        None, "corpora for test, perhaps with names, as in --valid-data-path; needs --train-data-path"
    )
    split: str = opt("949,50,1", "shares of the documents for training, validation and test")
    vocab_file: str | None = opt(None, "the tokenizer: a .model, .json or .txt file, or a folder with such a file")
    tokenizer_type: str = opt(
        "auto",
        "sentencepiece, cpm, cpm+rjieba, cpm-vocab, cpm-vocab+rjieba, gpt2-bpe or hf; auto detects the type from the "
        "files of --vocab-file",
    )
    seq_length: int = opt(1024, "number of tokens in a training sample", at_least(1))
    enc_seq_length: int | None = opt(
        None, "T5: length of the encoder's sequence in tokens; --seq-length if not given", at_least(8), family=T5
    )
    dec_seq_length: int | None = opt(
        None,
        "T5: maximum length of the decoder's sequence in tokens; by default, long enough for all masked spans",
        at_least(4),
        family=T5,
    )
    objective: str | None = opt(
        None,
        "training objective (docs/objectives.md). GPT-2 and Llama: lm (predict each next token; the default), sft "
        "(predict the answers of conversations) or prefix-lm (predict the text after a prefix with bidirectional "
        "attention). T5: span-corruption (the default) or prefix-lm",
        one_of(*dict.fromkeys((*DECODER_OBJECTIVES, *T5_OBJECTIVES))),
    )
    span_convention: str = opt(
        "t5",
        "T5: format of masked spans: t5, or cpm as in CPM-Pretrain (docs/t5.md)",
        one_of("t5", "cpm"),
        family=T5,
    )
    noise_density: float = opt(0.15, "T5: share of the tokens that are masked", between(0.01, 0.9), family=T5)
    mean_span_length: float = opt(3.0, "T5: mean number of tokens of a masked span", at_least(1), family=T5)
    num_sentinels: int = opt(
        100,
        "T5: number of sentinel tokens, which are added to the vocabulary and replace masked spans",
        at_least(1),
        family=T5,
    )
    fim_rate: float = opt(
        0.0,
        "with --objective lm: share of the documents that are turned into fill-in-the-middle documents, in which the "
        "middle is moved to the end (docs/objectives.md)",
        between(0, 1),
    )
    fim_spm_rate: float = opt(
        0.5,
        "share of the fill-in-the-middle documents with the order suffix, prefix, middle instead of prefix, suffix, "
        "middle",
        between(0, 1),
    )
    fim_tokens: tuple[str, ...] | None = opt(
        None, "special tokens of the tokenizer that mark prefix, middle and suffix, in this order"
    )
    reset_position_ids: bool = opt(False, "restart positions at 0 after each end-of-document token")
    reset_attention_mask: bool = opt(False, "attend within documents only")
    eod_mask_loss: bool = opt(False, "exclude the token after each end-of-document token from the loss")
    num_workers: int = opt(
        0, "number of worker processes that prefetch samples; with 0, the training process reads them", at_least(0)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # A frozen dataclass can set its own fields only in this way.
        for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
            if given := getattr(self, name):
                object.__setattr__(self, name, corpus_prefixes(given))

        if self.data_stages:
            # Keep the text of the stages instead of the name of a file, so that the settings contain the stages.
            text = stages_as_json(parse_stages(self.data_stages))
            object.__setattr__(self, "data_stages", (text,))

    def _problems(self) -> Iterator[str]:
        held_out = self.valid_data_path or self.test_data_path
        yield from problems_where(
            (
                self.data_stages and self.train_data_path,
                "--data-stages names the training data, so leave --train-data-path out",
            ),
            (
                self.train_data_path and self.data_path,
                "give either --data-path, which --split divides, or --train-data-path, not both",
            ),
            (
                held_out and self.data_path,
                "--valid-data-path and --test-data-path need --train-data-path or --data-stages instead of "
                "--data-path, which --split divides",
            ),
            (
                held_out and not self.train_data_path and not self.data_stages,
                "--valid-data-path and --test-data-path need --train-data-path or --data-stages",
            ),
        )

    @property
    def names_corpora(self) -> bool:
        """True if a flag names training corpora."""
        return bool(self.data_path or self.train_data_path or self.data_stages)

    @property
    def paths(self) -> tuple[str, ...] | StagedCorpora | dict[str, tuple[str, ...] | StagedCorpora]:
        """Corpora that --split divides, or a dict with the corpora of each split (train, valid, test).

        With --data-stages and --split, validation and test data come from the corpora of --data-path, by default from
        those of the first stage. So they do not change when stages are added. Raises ConfigError if no corpus is given.
        """
        # None and () both stand for no data. But with --data-stages, None for both lets --split make both.
        held_out = {"valid": self.valid_data_path or (), "test": self.test_data_path or ()}
        if self.data_stages:
            stages = parse_stages(self.data_stages)
            if self.valid_data_path is not None or self.test_data_path is not None:
                return {"train": StagedCorpora(stages, held_out=None), **held_out}
            return StagedCorpora(stages, self.data_path or stages[0].words)
        if self.data_path:
            return self.data_path
        if not self.train_data_path:
            raise ConfigError(
                "no corpus is given: pass --data-path with the prefix that tools/preprocess_data.py wrote"
            )
        return {"train": self.train_data_path, **held_out}
