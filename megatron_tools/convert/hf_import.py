"""Import of a model in Hugging Face's format: settings, tokenizer and tensors of the folder --from-hf."""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing.files import WEIGHT
from megatron.checkpointing.stream import Entry
from megatron.config import Config
from megatron.config.command_line import with_values
from megatron.ranks.rank_0 import print_notes
from megatron.tokenizer import SentinelTokenizer, load_tokenizer
from megatron.tokenizer.base import read_object
from megatron.tokenizer.load import file_of, folder_has_one, refuse_other_ids
from megatron.tokenizer.sentinels import own_sentinels
from megatron.tokenizer.sibling_files import generation_beside

from .hf_folder import Folder, FolderReader
from .upcycle import router_buffers


def from_hf(args: argparse.Namespace) -> tuple[Config, str, list[Entry]]:
    """Return (our settings, tokenizer fingerprint, tensors to write) for the model in the folder --from-hf."""
    theirs = Folder(Path(args.from_hf))
    print_notes(theirs.notes)
    generation_beside(theirs.path / "config.json")  # raises an error now if the file is malformed
    settings, fingerprint = _their_tokenizer(theirs, args.vocab_file)
    config = with_values(theirs.config, settings)
    entries = [_entry(match, theirs.tensors) for match in theirs.matches]
    for match in theirs.matches:
        if match.ours.endswith(".router.weight"):
            entries += router_buffers(match.ours.removesuffix(".weight"), config.model.num_experts or 0)
    return config, fingerprint, entries


def _their_tokenizer(theirs: Folder, vocab_file: str | None) -> tuple[dict[str, Any], str]:
    """Return (our tokenizer settings, fingerprint) for --vocab-file, else for the tokenizer in the model's folder."""
    there = folder_has_one(theirs.path)
    path = vocab_file
    if not path:
        if not there:
            _refuse_unusual_ids(theirs)
            print_notes([f"there is no tokenizer in {theirs.path}; training and generation need --vocab-file"])
            return {}, ""
        path = str(theirs.path)
    found = load_tokenizer(path)
    if vocab_file and there:
        refuse_other_ids(found, load_tokenizer(str(theirs.path)), f"{vocab_file} is not the tokenizer of {theirs.path}")
    settings: dict[str, Any] = {"vocab_file": path}
    tokenizer = found
    if theirs.config.is_t5:
        free = theirs.values["vocab_size"] - found.vocab_size - ("<pad>" not in found.specials)
        sentinels = len(own_sentinels(found, "t5")) or _extra_ids(file_of(path), free)
        settings["num_sentinels"] = sentinels
        tokenizer = SentinelTokenizer(found, sentinels, "t5")
    print_notes(theirs.check_tokenizer(tokenizer))
    return settings, found.fingerprint


def _refuse_unusual_ids(theirs: Folder) -> None:
    """Raise ValueError if a T5 without a tokenizer has other special-token ids than T5's own."""
    usual = {"pad_token_id": (0, None), "eos_token_id": (1, [1], None), "decoder_start_token_id": (0, None)}
    if theirs.config.is_t5 and any(theirs.values[key] not in ids for key, ids in usual.items()):
        raise ValueError(
            f"{theirs.path}: config.json has unusual ids for the padding, start or end token, but the folder "
            "contains no tokenizer; give --vocab-file"
        )


def _extra_ids(vocab_file: Path, free: int) -> int:
    """Return how many sentinels T5Tokenizer adds to a vocabulary that contains no sentinels.

    The key `extra_ids` in the tokenizer_config.json beside `vocab_file` gives this number. Without the key, the
    default is 100, but at most `free` and at least 1.
    free: number of rows of the model's embedding that belong to no token of the vocabulary.
    """
    nearby = vocab_file.with_name("tokenizer_config.json")
    given = read_object(nearby).get("extra_ids") if nearby.is_file() else None
    if given is None:
        if 0 < free < 100:
            print(
                f"note: {vocab_file} does not give the number of sentinels; assuming {free}, one for each unused "
                "embedding row"
            )
        return min(100, max(free, 1))
    if type(given) is not int or given < 1:
        raise ValueError(f"{nearby}: extra_ids is {given!r}, but a T5 needs at least one sentinel")
    return given


def _entry(match: Any, theirs: FolderReader) -> Entry:
    """Return the tensor to write for one of our weights, joined from theirs when it is written."""

    def make() -> Tensor:
        tensor: Tensor = match.join([theirs.read(name) for name in match.theirs])
        if not tensor.isfinite().all():
            print(f"note: NaN or Inf in {' and '.join(match.theirs)}")
        return tensor

    # Joining empty tensors gives the shape without reading any weights.
    parts = [torch.empty(*theirs.shape(name), device="meta") for name in match.theirs]
    return Entry(f"{WEIGHT}.{match.ours}", tuple(match.join(parts).shape), torch.float32, make)
