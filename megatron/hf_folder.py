"""Folders as Hugging Face's `from_pretrained` reads them: config.json, and safetensors in shards, written tensor by tensor."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .arguments import with_values
from .checkpointing.files import open_tensors
from .checkpointing.stream import Entry, write_entries
from .config import Config, ModelConfig
from .hf_names import gpt2_matches, t5_matches
from .model.init import put
from .model.layers import global_parameters
from .options import ConfigError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def write_tensors(folder: Path, entries: Sequence[Entry], max_shard_bytes: int) -> None:
    """model.safetensors, or shards and their index. No more than one tensor is in memory at a time."""
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.bytes
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    names = ["model.safetensors"] if len(shards) == 1 else names
    for name, shard in zip(names, shards, strict=True):
        write_entries(folder / name, shard)
    if len(shards) > 1:
        where = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        total = sum(entry.bytes for entry in entries)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


class FolderReader:
    """Tensors of a folder by name, one at a time. Raises ValueError for pickled weights and what is missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._opened: dict[str, Any] = {}
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            self._where: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        elif (folder / "model.safetensors").is_file():
            self._where = dict.fromkeys(self._open("model.safetensors").keys(), "model.safetensors")
        else:
            raise ValueError(
                f"{folder} holds no model.safetensors; weights in pickled files are not read: save them with "
                f"save_pretrained(..., safe_serialization=True)"
            )

    def _open(self, name: str) -> Any:
        if name not in self._opened:
            self._opened[name] = open_tensors(self.folder / name)
        return self._opened[name]

    def _find(self, name: str) -> tuple[Any, str]:
        """The file that holds a tensor, and its name there."""
        short = name.removeprefix("transformer.")  # GPT-2's without its head are saved without the prefix
        found = name if name in self._where else short
        if found not in self._where:
            raise ValueError(f"{self.folder} holds no tensor {name}")
        return self._open(self._where[found]), found

    def shape(self, name: str) -> list[int]:
        file, found = self._find(name)
        shape: list[int] = file.get_slice(found).get_shape()
        return shape

    def read(self, name: str) -> Tensor:
        file, found = self._find(name)
        tensor: Tensor = file.get_tensor(found)
        return tensor.float()


def publish(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write into a folder of a temporary name, which then gets its own. Raises ValueError if it exists."""
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} exists and is not empty; choose another --output")
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        fill(temporary)
        if folder.exists():
            folder.rmdir()
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _refuse(what: Sequence[tuple[bool, str]], model: str) -> None:
    for wrong, setting in what:
        if wrong:
            raise ConfigError(f"Hugging Face's {model} cannot be a model with {setting}")


def gpt2_config(m: ModelConfig, positions: int, eod: int, dtype: str) -> dict[str, Any]:
    """config.json of GPT2LMHeadModel. Raises ConfigError for what it cannot be."""
    _refuse([
        (m.normalization != "layernorm", f"--normalization {m.normalization}"),
        (m.activation != "gelu", f"--activation {m.activation}"),
        (not m.hidden_bias, "--no-hidden-bias"),
        (not m.scale_attention, "--no-scale-attention"),
        (m.head_size * m.num_attention_heads != m.hidden_size, f"--kv-hidden-size {m.kv_hidden_size}"),
    ], "GPT-2")  # fmt: skip
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": m.vocab_size, "n_positions": positions,
        "n_embd": m.hidden_size, "n_layer": m.num_layers, "n_head": m.num_attention_heads, "n_inner": m.ff_size,
        "activation_function": "gelu_new", "layer_norm_epsilon": m.layernorm_epsilon, "resid_pdrop": m.hidden_dropout,
        "embd_pdrop": m.hidden_dropout, "attn_pdrop": m.attention_dropout, "bos_token_id": eod, "eos_token_id": eod,
        "tie_word_embeddings": m.tie_embeddings, "dtype": str(DTYPES[dtype]).removeprefix("torch."),
    }  # fmt: skip


def t5_config(m: ModelConfig, pad: int, eod: int, dtype: str) -> dict[str, Any]:
    """config.json of T5ForConditionalGeneration. Raises ConfigError for what it cannot be."""
    _refuse([
        (m.position_embedding != "relative", "learned positions (the cpm variant)"),
        (m.normalization != "rmsnorm", f"--normalization {m.normalization}"),
        (m.activation == "gelu", "--activation gelu"),
        (m.hidden_bias, "--hidden-bias"),
    ], "T5")  # fmt: skip
    return {
        "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "vocab_size": m.vocab_size,
        "d_model": m.hidden_size, "d_kv": m.head_size, "d_ff": m.ff_size, "num_layers": m.num_layers,
        "num_decoder_layers": m.decoder_layers, "num_heads": m.num_attention_heads,
        "relative_attention_num_buckets": m.relative_attention_num_buckets,
        "relative_attention_max_distance": m.relative_attention_max_distance, "dropout_rate": m.hidden_dropout,
        "layer_norm_epsilon": m.layernorm_epsilon, "feed_forward_proj": m.activation, "is_encoder_decoder": True,
        "tie_word_embeddings": m.tie_embeddings, "scale_decoder_outputs": m.tie_embeddings and m.scale_tied_logits,
        "pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": eod, "dtype": str(DTYPES[dtype]).removeprefix("torch."),
    }  # fmt: skip


def settings_of(content: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Our settings, by their flat names, for a config.json of theirs. Raises ValueError for other models."""
    kind = content.get("model_type")
    if kind == "gpt2":
        activation = content.get("activation_function", "gelu_new")
        if activation not in ("gelu_new", "gelu_pytorch_tanh"):
            raise ValueError(f"{where}: GPT-2 with the activation {activation} is not known here")
        return {
            "num_layers": content["n_layer"], "hidden_size": content["n_embd"], "num_attention_heads": content["n_head"],
            "ff_hidden_size": content.get("n_inner"), "vocab_size": content["vocab_size"],
            "max_position_embeddings": content["n_positions"], "seq_length": content["n_positions"],
            "layernorm_epsilon": content.get("layer_norm_epsilon", 1e-5), "hidden_dropout": content.get("resid_pdrop", 0.1),
            "attention_dropout": content.get("attn_pdrop", 0.1),
            "tie_embeddings": content.get("tie_word_embeddings", True),
        }  # fmt: skip
    if kind in ("t5", "mt5"):
        tied = content.get("tie_word_embeddings", True)
        return {
            "num_layers": content["num_layers"], "num_decoder_layers": content.get("num_decoder_layers"),
            "hidden_size": content["d_model"], "num_attention_heads": content["num_heads"],
            "kv_hidden_size": content["d_kv"], "ff_hidden_size": content["d_ff"], "vocab_size": content["vocab_size"],
            "relative_attention_num_buckets": content.get("relative_attention_num_buckets", 32),
            "relative_attention_max_distance": content.get("relative_attention_max_distance", 128),
            "layernorm_epsilon": content.get("layer_norm_epsilon", 1e-6), "hidden_dropout": content.get("dropout_rate", 0.1),
            "activation": content.get("feed_forward_proj", "relu"), "tie_embeddings": tied,
            "scale_tied_logits": tied and content.get("scale_decoder_outputs", True), "position_embedding": "relative",
            "normalization": "rmsnorm", "hidden_bias": False, "scale_attention": False, "enc_seq_length": 512,
            "span_convention": "t5",
        }  # fmt: skip
    raise ValueError(f"{where} describes a model of type {kind!r}; gpt2, t5 and mt5 can be converted")


def entries_of(
    matches: Iterator[Any], read: Callable[[str], Tensor], shape: Callable[[str], Sequence[int]], dtype: str
) -> list[Entry]:
    """What to write for Hugging Face, from our tensors."""
    found = []
    for match in matches:
        # Shapes follow from an empty tensor of ours, without reading it.
        for i, part in enumerate(match.split(torch.empty(*shape(match.ours), device="meta"))):

            def make(match: Any = match, i: int = i) -> Tensor:
                tensor: Tensor = match.split(read(match.ours))[i]
                return tensor

            found.append(Entry(match.theirs[i], tuple(part.shape), DTYPES[dtype], make))
    return found


def is_hf_folder(folder: Path) -> bool:
    """Whether a folder holds a model of theirs; a run directory has a config.json, too, without a model_type."""
    path = folder / "config.json"
    return path.is_file() and "model_type" in json.loads(path.read_text(encoding="utf-8"))


def load_hf_config(folder: Path, model_parallel_size: int = 1, pipe_parallel_size: int = 0) -> Config:
    """The settings of a folder of theirs."""
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    layout = {"model_parallel_size": model_parallel_size, "pipe_parallel_size": pipe_parallel_size}
    return with_values(Config(), {**settings_of(content, folder / "config.json"), **layout})


@torch.no_grad()
def load_hf_weights(folder: Path, config: Config, model: Any) -> None:
    """Fill what this process holds of a model of ours from a folder of theirs."""
    theirs = FolderReader(folder)
    matches = {match.ours: match for match in (t5_matches if config.is_t5 else gpt2_matches)(config.model)}
    for name, parameter in global_parameters(model):
        match = matches[name]
        put(parameter, parameter, match.join([theirs.read(each) for each in match.theirs]))
