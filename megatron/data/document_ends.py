"""End-of-document tokens, at which GPT-2 and Llama separate the documents of a window."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..config import Config
from .fingerprints import made_with
from .index_check import CHECKED_IDS
from .indexed_dataset import IndexedDataset

REMEDY = "preprocess the text again with --append-eod, or do without these settings"


def separating_flags(config: Config) -> str:
    """Return the given flags that separate documents at end-of-document tokens, joined by "and"; "" if there are none.

    A T5 and fine-tuning take the documents from the index of the corpus, and a custom model from anywhere.
    """
    data = config.data
    if config.model.family is None or config.is_t5 or config.objective == "sft":
        return ""
    flags = {"--reset-attention-mask": data.reset_attention_mask, "--reset-position-ids": data.reset_position_ids}
    return " and ".join(flag for flag, is_given in flags.items() if is_given)


def missing_ends(metadata: Mapping[str, Any], config: Config) -> str:
    """Return a message if a corpus has no end-of-document tokens, but flags separate documents at them, else "".

    metadata: metadata of the corpus (PREFIX.json).
    """
    flags = separating_flags(config)
    if not flags or metadata.get("append_eod", True):
        return ""
    return f"has no end-of-document tokens, at which {flags} would separate its documents"


def notes_on_ends(prefixes: Sequence[str], eod: int, config: Config) -> list[str]:
    """Return a note for each corpus without metadata that seems to lack the token `eod`, at which flags separate.

    Raises ValueError if the metadata of a corpus show that it has no end-of-document tokens.
    """
    flags = separating_flags(config)
    if not flags:
        return []
    notes = []
    for prefix in prefixes:
        metadata = made_with(prefix)
        if metadata is not None:
            if problem := missing_ends(metadata, config):
                raise ValueError(f"{prefix}.bin {problem}: {REMEDY}")
        elif not _has_token(prefix, eod):  # such as a corpus of Megatron-LM
            notes.append(
                f"{prefix}.bin seems to have no end-of-document tokens, at which {flags} would separate its documents; "
                f"{REMEDY}"
            )
    return notes


def _has_token(prefix: str, token: int) -> bool:
    """Return whether the first or the last million tokens of a corpus include `token`."""
    tokens = IndexedDataset(prefix).tokens
    last_start = max(0, len(tokens) - CHECKED_IDS)
    return token in tokens[:CHECKED_IDS] or token in tokens[last_start:]
