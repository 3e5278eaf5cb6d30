"""Contracts of this project with other packages, checked with the installed release of one package.

`python -m tests.releases.watch PACKAGE` prints the outcomes of the package's contracts as JSON: contract -> "right",
"wrong: ...", "refused: ..." (this project names the release and stops) or "fails: ...".
"""

import json
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from importlib import import_module
from importlib.metadata import version
from typing import NamedTuple

Check = Callable[[], None]  # raises AssertionError if the package gives another result than the right one


class Watched(NamedTuple):
    """A package under watch.

    releases: releases to measure, the oldest that pyproject.toml allows first. module: module of this folder whose
    dictionary CHECKS has the checks of this package. uses: contract -> what of this project depends on it. Chinese
    words for both are in docs/site/releases.py.
    """

    releases: tuple[str, ...]
    module: str
    uses: Mapping[str, str]


CONVERT = "`convert_checkpoint.py --verify`"
EXPORT = "exported tokenizers"
PREPROCESS = "`preprocess_data.py`"
TRAIN_TOKENIZER = "`train_tokenizer.py`"
NEAR = "`clean_corpus.py --near-duplicates`"
STORE = "corpora and checkpoints at `s3://`"

WATCHED = {
    "transformers": Watched(
        ("5.3.0", "5.10.4", "5.24.0"),
        "with_transformers",
        {
            "logits of GPT-2": CONVERT,
            "logits of Llama": CONVERT,
            "logits of T5": CONVERT,
            "logits of UMT5 that are not scaled": CONVERT,
            "logits of Mixtral": CONVERT,
            "ids of an imported vocab.json": CONVERT,
            "ids of an exported tokenizer.json": EXPORT,
            "ids of an exported Llama tokenizer.model": EXPORT,
            "auxiliary loss of a padded batch": "training of exported Mixtral models with transformers",
            "T5 loss of accumulated batches": "training of exported T5 models with transformers",
            "vocab_file= of GPT2Tokenizer": "scripts that load an exported vocab.json",
        },
    ),
    "tokenizers": Watched(
        ("0.21.0", "0.22.2", "0.23.3"),
        "with_tokenizers",
        {
            "ids of byte-level BPE": PREPROCESS,
            "ids of added tokens": PREPROCESS,
            "vocabulary from a text": TRAIN_TOKENIZER,
        },
    ),
    "sentencepiece": Watched(
        ("0.2.2", "0.2.3"),
        "with_sentencepiece",
        {
            "ids of BPE": PREPROCESS,
            "ids of unigram": PREPROCESS,
            "ids with several threads": PREPROCESS,
            "vocabulary from a text": TRAIN_TOKENIZER,
        },
    ),
    "rjieba": Watched(("0.1.13", "0.2.2"), "with_files", {"words of jieba": PREPROCESS}),
    "numpy": Watched(
        ("2.0.0", "2.4.6"), "with_files", {"random numbers of a seed": "the order of samples after a resume"}
    ),
    "safetensors": Watched(
        ("0.5.0", "0.8.0"),
        "with_files",
        {
            "tensors of known bytes": "`convert_checkpoint.py --from-hf`",
            "tensors of our files": "exported checkpoints",
        },
    ),
    "blake3": Watched(("1.0.0", "1.0.11"), "with_files", {"checksum of a file": "`BLAKE3SUMS` of checkpoints"}),
    "zstandard": Watched(
        ("0.23.0", "0.24.0", "0.25.0"),
        "with_files",
        {"frames of known bytes": PREPROCESS, "several frames of unknown size": PREPROCESS},
    ),
    "pyarrow": Watched(("17.0.0", "26.0.1"), "with_files", {"documents of a .parquet file": PREPROCESS}),
    "rensa": Watched(("0.5.0",), "with_files", {"estimated similarity": NEAR, "signature of a document": NEAR}),
    "s3fs": Watched(
        ("2024.10.0", "2026.9.0"),
        "with_s3fs",
        {"listing after a write": STORE, "ranged reads": STORE, "a file of several parts": STORE},
    ),
    "lm-eval": Watched(
        ("0.4.10", "0.4.13"), "with_references", {"accuracy of a task": "`--eval-tasks`, `evaluate.py --tasks`"}
    ),
    "megatron-core": Watched(
        ("0.14.0", "0.16.1"),
        "with_references",
        {"corpus files": "`.bin` and `.idx` files", "defaults, learning rates, router loss": "flags of Megatron-LM"},
    ),
}


def outcome(check: Check, release: str) -> str:
    """Run a check; return its outcome. release: the installed release of the package."""
    try:
        with redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check()
    except Exception as error:
        return describe(error, release)
    return "right"


def describe(error: Exception, release: str) -> str:
    """Return the outcome that an error means: "refused" for a ValueError that names the release."""
    words = " ".join(str(error).split()) or "numbers differ"
    if isinstance(error, ValueError) and release in words:
        kind = "refused"
    elif isinstance(error, AssertionError):
        kind = "wrong"
    else:
        kind = f"fails: {type(error).__name__}"
    return f"{kind}: {words}"[:300]


def row(package: str) -> dict[str, object]:
    """Run all contracts of a package with its installed release."""
    watched = WATCHED[package]
    release = version(package)
    checks: Mapping[str, Check] = import_module(f"{__package__}.{watched.module}").CHECKS[package]
    found = {name: outcome(checks[name], release) for name in watched.uses}
    return {"package": package, "release": release, "contracts": found}


if __name__ == "__main__":
    print(json.dumps(row(sys.argv[1])))
