"""Sidecars of corpora: the PREFIX.json that the preprocessor writes beside the .bin/.idx pairs of a corpus."""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron.config import Config
from megatron.data.corpus_paths import TRIPLE_PARTS, has_loss_mask, prefixes_of
from megatron.data.fingerprints import made_with
from megatron.data.indexed_dataset import LOSS_SUFFIX
from megatron.storage import to_path

# Sidecar entries that remain valid when corpora are merged or split.
KEPT_ENTRIES = (
    "tokenizer",
    "fingerprint",
    "vocab_size",
    "eod",
    "append_eod",
    "objective",
    "chat_template",
    "chat_date",
)


def read_sidecar(prefix: str) -> dict[str, Any]:
    """Return the content of a pair's sidecar, the PREFIX.json of the preprocessor; {} if there is no sidecar.

    Raises ValueError for a file that is damaged or no sidecar.
    """
    # A CPM corpus for T5 has three pairs and a corpus of conversations two, but only one sidecar. To find it, remove
    # the ending, such as _target, that distinguishes the prefixes of the pairs.
    corpus_prefix = re.sub(rf"(_({'|'.join(TRIPLE_PARTS)})|{LOSS_SUFFIX})$", "", prefix)
    for name in (prefix, corpus_prefix):
        if to_path(f"{name}.json").is_file():
            return made_with(name) or {}
    return {}


def check_output(prefix: str, sources: Sequence[str] = (), endings: Iterable[str] = ()) -> None:
    """Raise ValueError if a new corpus would overwrite files that are not an older corpus of the same kind.

    sources: prefixes of the corpora from which it is made, which have pairs of the same endings. endings: those of the
    pairs of a corpus without sources.
    """
    names = [prefix + ending for ending in endings]
    source_paths = []
    for source in sources:
        for pair in pair_prefixes(source):
            source_paths.append(to_path(pair).resolve())
            names.append(prefix + pair.removeprefix(source))
    for name in names:
        if Path(name).resolve() in source_paths:
            raise ValueError(f"{name} is one of the given pairs; choose another --output")
    # A masked corpus for T5 and an ordinary one of the same prefix would have the same sidecar. An old loss mask would
    # count as that of the new corpus.
    for other in (*pair_prefixes(prefix), f"{prefix}_context"):
        if other not in names and os.path.exists(f"{other}.idx"):
            raise ValueError(f"{other}.idx is of another corpus with the sidecar {prefix}.json; choose another name")
    path = f"{prefix}.json"
    if os.path.isfile(path):
        # The file may be a large text corpus, so read only its beginning. Every sidecar begins with such an entry.
        with open(path, "rb") as file:
            if b'"fingerprint"' not in file.read(4096):
                raise ValueError(f"{path} would be overwritten, but is no sidecar of a corpus; choose another name")


def chat_corpora(config: Config) -> list[tuple[str, dict[str, Any]]]:
    """Return the corpora of a fine-tuning run (--objective sft), each as (prefix, sidecar).

    Corpora whose sidecar records no chat template are omitted.
    """
    data = config.data
    if config.objective != "sft" or not data.names_corpora:
        return []
    corpora = []
    for prefix in prefixes_of(data.paths):
        metadata = read_sidecar(prefix)
        if metadata.get("chat_template"):
            corpora.append((prefix, metadata))
    return corpora


def pair_prefixes(prefix: str) -> list[str]:
    """Return the prefix of a pair and, if it exists, the prefix of the pair that holds its loss mask."""
    return [prefix, prefix + LOSS_SUFFIX] if has_loss_mask(prefix) else [prefix]
