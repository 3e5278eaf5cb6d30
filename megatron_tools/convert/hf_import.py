"""Import of a model in Hugging Face's format: settings, tokenizer and tensors of the folder --from-hf."""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing.files import WEIGHT
from megatron.checkpointing.stream import LazyTensor
from megatron.config import Config
from megatron.config.command_line import with_values
from megatron.ranks.rank_0 import print_notes
from megatron.tokenizer import SentinelTokenizer, load_tokenizer
from megatron.tokenizer.load import find_vocab_file, has_vocab_file
from megatron.tokenizer.sentinels import own_sentinels
from megatron.tokenizer.sibling_files import SETTINGS, read_generation_config, read_tokenizer_config

from .hf_folder import HFModelFolder, HFTensorReader, check_vocab_file
from .upcycle import router_buffers


def import_hf(args: argparse.Namespace) -> tuple[Config, str, list[LazyTensor]]:
    """Return (our settings, tokenizer fingerprint, tensors to write) for the model in the folder --from-hf."""
    hf_folder = HFModelFolder(Path(args.from_hf))
    print_notes(hf_folder.notes)
    read_generation_config(hf_folder.path / "config.json")  # raises an error now if the file is malformed
    settings, fingerprint = _convert_tokenizer(hf_folder, args.vocab_file)
    config = with_values(hf_folder.config, settings)
    entries = [_joined_entry(match, hf_folder.tensors) for match in hf_folder.matches]
    # Our routers also have buffers, such as counts of tokens, which their files lack.
    for match in hf_folder.matches:
        if match.our_name.endswith(".router.weight"):
            router = match.our_name.removesuffix(".weight")
            entries += router_buffers(router, config.model.num_experts or 0)
    return config, fingerprint, entries


def _convert_tokenizer(hf_folder: HFModelFolder, vocab_file: str | None) -> tuple[dict[str, Any], str]:
    """Return (our tokenizer settings, fingerprint) for --vocab-file, else for the tokenizer in the model's folder."""
    if not vocab_file and not has_vocab_file(hf_folder.path):
        _refuse_unusual_ids(hf_folder)
        print_notes([f"there is no tokenizer in {hf_folder.path}; training and generation need --vocab-file"])
        return {}, ""
    path = vocab_file or str(hf_folder.path)
    tokenizer = load_tokenizer(path)
    check_vocab_file(hf_folder.path, tokenizer, vocab_file)
    settings: dict[str, Any] = {"vocab_file": path}
    if hf_folder.config.is_t5:
        # Rows of the embedding that no token uses. <pad> gets one of them if the vocabulary lacks it.
        unused_rows = hf_folder.values["vocab_size"] - tokenizer.vocab_size
        if "<pad>" not in tokenizer.specials:
            unused_rows -= 1
        # If the vocabulary contains no sentinels (0), T5Tokenizer adds some.
        num_sentinels = len(own_sentinels(tokenizer, "t5")) or _sentinel_count(find_vocab_file(path), unused_rows)
        settings["num_sentinels"] = num_sentinels
        tokenizer = SentinelTokenizer(tokenizer, num_sentinels, "t5")
    print_notes(hf_folder.check_tokenizer(tokenizer))
    return settings, tokenizer.fingerprint


def _refuse_unusual_ids(hf_folder: HFModelFolder) -> None:
    """Raise ValueError if a T5 without a tokenizer has other special-token ids than T5's own."""
    if not hf_folder.config.is_t5:
        return
    # T5's own tokenizer pads and starts with 0 and ends with 1; None: the file gives no id.
    usual_ids = {
        "pad_token_id": (0, None),
        "eos_token_id": (1, [1], None),
        "decoder_start_token_id": (0, None),
    }
    for key, ids in usual_ids.items():
        if hf_folder.values[key] not in ids:
            raise ValueError(
                f"{hf_folder.path}: config.json has unusual ids for the padding, start or end token, but the folder "
                "contains no tokenizer; give --vocab-file"
            )


def _sentinel_count(vocab_file: Path, free_rows: int) -> int:
    """Return how many sentinels T5Tokenizer adds to a vocabulary that contains no sentinels.

    The key `extra_ids` in the tokenizer_config.json beside `vocab_file` gives this number. Without the key, the
    default is 100, but at most `free_rows` and at least 1.
    free_rows: number of rows of the model's embedding that belong to no token of the vocabulary.
    """
    extra_ids = read_tokenizer_config(vocab_file).get("extra_ids")
    if extra_ids is None:
        if 0 < free_rows < 100:
            print(
                f"note: {vocab_file} does not give the number of sentinels; assuming {free_rows}, one for each unused "
                "embedding row"
            )
        return min(100, max(free_rows, 1))
    if type(extra_ids) is not int or extra_ids < 1:
        raise ValueError(
            f"{vocab_file.with_name(SETTINGS)}: extra_ids is {extra_ids!r}, but a T5 needs at least one sentinel"
        )
    return extra_ids


def _joined_entry(match: Any, hf_tensors: HFTensorReader) -> LazyTensor:
    """Return the tensor to write for one of our weights, joined from theirs when it is written."""

    def build() -> Tensor:
        parts = list(map(hf_tensors.read, match.their_names))
        tensor: Tensor = match.join(parts)
        # Such a model is of little use, but it is converted as it is.
        if not tensor.isfinite().all():
            print(f"note: NaN or Inf in {' and '.join(match.their_names)}")
        return tensor

    # Joining empty tensors gives the shape without reading any weights.
    empty_parts = [torch.empty(*hf_tensors.shape(name), device="meta") for name in match.their_names]
    shape = tuple(match.join(empty_parts).shape)
    return LazyTensor(f"{WEIGHT}.{match.our_name}", shape, torch.float32, build)
