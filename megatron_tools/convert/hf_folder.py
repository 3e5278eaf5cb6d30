"""Reading and writing of Hugging Face folders (config.json and safetensors files), one tensor at a time."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron import mpu
from megatron.atomic import absence
from megatron.checkpointing.bounds import refuse_absurd_sizes
from megatron.checkpointing.checksums import preferred
from megatron.checkpointing.files import open_tensors
from megatron.checkpointing.stream import Entry, write_entries
from megatron.config import Config
from megatron.config.command_line import with_values
from megatron.config.fields import ConfigError
from megatron.model.layers import global_parameters
from megatron.tokenizer.base import read_object
from megatron_tools.shapes import whole_shapes

from .hf_config import FAMILIES, check_tokenizer, notes_on_scale, read_config, settings_of, unread_keys
from .hf_names import Match, matches_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FLOATS = ("F64", "F32", "F16", "BF16")  # float dtypes as safetensors names them
HEAD = "lm_head.weight"
# Names under which the files may contain the embedding matrix.
EMBEDDINGS = (
    "transformer.wte.weight", "model.embed_tokens.weight", "shared.weight", "encoder.embed_tokens.weight",
    "decoder.embed_tokens.weight", HEAD,
)  # fmt: skip
PREFIX = re.compile(r"^(transformer|model)\.")  # files saved from a model without a head (GPT2Model) omit this prefix
CONSTANT = re.compile(
    r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias|(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
)
Place = tuple[int, slice]  # number of an expert, and rows of its matrix
# Tensors of transformers 5 that hold the matrices of all experts: [e, 2f, h] and [e, h, f]
FUSED = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)")
# Mixtral's names of tensors -> names in transformers 5, which its files have if they hold FUSED tensors.
NEW_NAMES = {".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}


def write_tensors(folder: Path, entries: Sequence[Entry], max_shard_bytes: int) -> None:
    """Write model.safetensors, or several shards and their index if the size exceeds `max_shard_bytes`.

    At most one tensor is in memory at a time.
    """
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.bytes
    if len(shards) == 1:
        write_entries(folder / "model.safetensors", shards[0], preferred())
        return
    where = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_entries(folder / name, shard, preferred())
        for entry in shard:
            where[entry.name] = name
    total = sum(entry.bytes for entry in entries)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


class FolderReader:
    """Reader of the tensors in a Hugging Face folder, one at a time and by name.

    Raises ValueError if the folder has only pickled weights, or if a tensor is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._opened: dict[str, Any] = {}
        self._asked: set[str] = set()
        index = folder / "model.safetensors.index.json"
        single = (folder / "model.safetensors").is_file()
        if index.is_file():
            self._where = _weight_map(index)
            if single and set(self._where.values()) != {"model.safetensors"}:
                raise ValueError(
                    f"{folder} contains model.safetensors and a model.safetensors.index.json that lists other files; "
                    f"remove the one that is left over from another model (transformers reads model.safetensors)"
                )
        elif single:
            self._where = dict.fromkeys(self._open("model.safetensors").keys(), "model.safetensors")
        else:
            _refuse_dangling(folder / "model.safetensors", index)
            raise ValueError(
                f"{folder} contains no model.safetensors; pickled weights are not read, so save them with "
                f"save_pretrained(..., safe_serialization=True)"
            )
        # name of an expert's matrix -> (FUSED tensor that holds it, its place in the tensor)
        self._parts: dict[str, tuple[str, Place]] = {}
        for name in list(self._where):
            if match := FUSED.fullmatch(name):
                self._add_experts(name, *match.groups())

    def _add_experts(self, fused: str, at: str, kind: str) -> None:
        """Add the matrices of each expert to the known tensors, and remove the tensor `fused`, which holds them."""
        file = self._open(self._where[fused])
        shape = file.get_slice(fused).get_shape() if fused in file.keys() else []  # noqa: SIM118
        if len(shape) != 3 or 0 in shape:
            return
        half = shape[1] // 2
        rows = {kind: slice(None)}
        if kind == "gate_up_proj":
            rows = {"gate_proj": slice(0, half), "up_proj": slice(half, None)}
        where = self._where.pop(fused)
        for e in range(shape[0]):
            for projection, place in rows.items():
                name = f"{at}{e}.{projection}.weight"
                self._where[name] = where
                self._parts[name] = fused, (e, place)

    def _open(self, name: str) -> Any:
        if name not in self._opened:
            _refuse_dangling(self.folder / name)
            self._opened[name] = open_tensors(self.folder / name)
        return self._opened[name]

    def _name(self, name: str) -> str | None:
        """Return the name that the files use for tensor `name`, or None if they do not contain this tensor.

        Files may omit the prefix `transformer.` or `model.`, may use any name in EMBEDDINGS for the embedding, and may
        have either of two names for the tensors of Mixtral's experts.
        """
        names = [name]
        if ".block_sparse_moe." in name:
            new = name
            for old, other in NEW_NAMES.items():
                new = new.replace(old, other)
            names.append(new)
        if name in EMBEDDINGS and name != HEAD:
            names += EMBEDDINGS
        for each in names:
            for found in (each, PREFIX.sub("", each)):
                if found in self._where:
                    return found
        return None

    def shapes(self) -> list[list[int]]:
        """Return the shapes of all tensors in the folder's files."""
        files = [self._open(name) for name in sorted(set(self._where.values()))]
        return [file.get_slice(name).get_shape() for file in files for name in file.keys()]  # noqa: SIM118

    def holds(self, name: str) -> bool:
        """Return whether the files contain tensor `name`, with or without the prefix `transformer.` or `model.`."""
        return name in self._where or PREFIX.sub("", name) in self._where

    def unread(self, ignored: Sequence[str]) -> list[str]:
        """Return the names of tensors that neither `shape` nor `read` has used so far, except redundant tensors.

        Redundant tensors are copies of the embedding, constants that old versions of transformers saved, and tensors
        whose name matches a pattern in `ignored`.
        """
        known = {*EMBEDDINGS, *(PREFIX.sub("", name) for name in EMBEDDINGS)}
        found = []
        for name in sorted(set(self._where) - self._asked - known):
            redundant = CONSTANT.fullmatch(name) or any(re.search(pattern, name) for pattern in ignored)
            if not redundant:
                found.append(name)
        return found

    def _find(self, name: str) -> tuple[Any, str, Place | None]:
        """Return the file that holds a tensor, the name of the stored tensor, and the place of a part of it."""
        found = self._name(name)
        if found is None:
            raise ValueError(f"{self.folder} contains no tensor {name}")
        self._asked.add(found)
        where = self._where[found]
        file = self._open(where)
        stored, place = self._parts.get(found, (found, None))
        if stored not in file.keys():  # noqa: SIM118
            raise ValueError(
                f"{self.folder / where} lacks {stored}, which model.safetensors.index.json places in this file"
            )
        dtype = file.get_slice(stored).get_dtype()
        if dtype not in FLOATS:
            raise ValueError(
                f"{self.folder / where}: {stored} is quantized ({dtype}); save the model again in one of "
                f"{', '.join(FLOATS)}"
            )
        return file, stored, place

    def shape(self, name: str) -> list[int]:
        """Return the shape of a tensor. Raises ValueError if it is quantized."""
        file, stored, place = self._find(name)
        shape: list[int] = file.get_slice(stored).get_shape()
        return shape if place is None else [len(range(*place[1].indices(shape[1]))), shape[2]]

    def read(self, name: str) -> Tensor:
        """Return the tensor `name`, converted to fp32. Raises ValueError if it is quantized."""
        file, stored, place = self._find(name)
        tensor: Tensor = file.get_tensor(stored) if place is None else file.get_slice(stored)[place]
        return tensor.float()


def _refuse_dangling(*paths: Path) -> None:
    """Raise ValueError for a link to a file that does not exist, as in an incomplete cache of Hugging Face."""
    for path in paths:
        if path.is_symlink() and not path.exists():
            raise ValueError(f"{path} {absence(path)}: download the model again, or copy the whole cache")


def _weight_map(index: Path) -> dict[str, str]:
    """Return tensor name -> file name from an index file. Raises ValueError for a file in another folder."""
    found = read_object(index).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(f, str) and f == Path(f).name for f in found.values()):
        raise ValueError(f"{index}: weight_map must map each tensor to the name of a file in the same folder")
    return found


def entries_of(
    matches: Iterable[Match], read: Callable[[str], Tensor], shape: Callable[[str], Sequence[int]], dtype: str
) -> list[Entry]:
    """Return one entry for each Hugging Face tensor, which is computed from our tensor when the entry is written.

    read, shape: functions that return our tensor and its shape by name. Writing raises ValueError if a value overflows
    `dtype`.
    """
    found = []
    for match in matches:
        # Splitting a meta tensor with the shape of our tensor gives Hugging Face's shapes without reading weights.
        for i, part in enumerate(match.split(torch.empty(*shape(match.ours), device="meta"))):

            def make(match: Any = match, i: int = i) -> Tensor:
                tensor: Tensor = match.split(read(match.ours))[i]
                if tensor.isfinite().all() and not tensor.to(DTYPES[dtype]).isfinite().all():
                    largest = float(tensor.abs().max())
                    raise ValueError(
                        f"{match.theirs[i]} reaches {largest:.3g}, which overflows {dtype}; choose another --dtype"
                    )
                return tensor

            found.append(Entry(match.theirs[i], tuple(part.shape), DTYPES[dtype], make))
    return found


def is_hf_folder(folder: Path) -> bool:
    """Return whether a folder holds a Hugging Face model. A run directory's config.json has no model_type."""
    path = folder / "config.json"
    return path.is_file() and "model_type" in read_object(path)


class Folder:
    """A Hugging Face model in a folder: its settings and tensors, checked against each other.

    values: config.json with defaults filled in. config: the same settings as this project's Config. notes: remarks for
    the user. Raises ValueError if the model cannot be converted, if files contradict each other, or if the model does
    not use a tensor.
    """

    def __init__(self, path: Path, model_parallel_size: int = 1, pipe_parallel_size: int = 0) -> None:
        self.path = path
        where = path / "config.json"
        _refuse_dangling(where)
        if not where.is_file():
            raise ValueError(f"{where} does not exist: {path} is not a Hugging Face model")
        self.given = read_object(where)
        self.values = read_config(self.given, where)
        self.tensors = FolderReader(path)
        refuse_absurd_sizes(self.values, self.tensors.shapes(), where)
        settings, self.notes = settings_of(self.values, self._tied(), where)
        if unread := unread_keys(self.given):
            self.notes.append(
                f"{where} has keys without effect on {self.values['model_type']} models: {', '.join(unread)}"
            )
        layout = {
            "model_parallel_size": model_parallel_size,
            "pipe_parallel_size": pipe_parallel_size,
            "sequence_parallel": False,  # Sequence parallelism would restrict the lengths of texts.
        }
        try:
            self.config = with_values(Config(), {**settings, **layout})
        except ConfigError as error:
            raise ValueError(f"{where}: {error}") from None
        self.notes += notes_on_scale(self.config.model)
        self.matches = list(matches_of(self.config.model))
        self._check_tensors()

    def _tied(self) -> bool:
        """Return whether input and output embedding are tied, judged by the tensors rather than tie_word_embeddings."""
        holds_head = self.tensors.holds(HEAD)
        first = None
        for name in EMBEDDINGS:
            if name == HEAD or not self.tensors.holds(name):
                continue
            first = first or name
            if not torch.equal(self.tensors.read(name), self.tensors.read(first)):
                raise ValueError(
                    f"{self.path}: {name} and {first} differ, but this project's models have one input embedding"
                )
        if first and holds_head:
            return torch.equal(self.tensors.read(HEAD), self.tensors.read(first))
        if not self.values["tie_word_embeddings"]:
            missing = HEAD if first else "embedding"
            raise ValueError(
                f"{self.path}/config.json has tie_word_embeddings false, but the files contain no {missing}"
            )
        return True

    def _check_tensors(self) -> None:
        """Raise ValueError unless the files hold all tensors of the model, with the right shapes, and no others."""
        shapes = whole_shapes(self.config)
        for match in self.matches:
            parts = match.split(torch.empty(*shapes[match.ours], device="meta"))
            for name, part in zip(match.theirs, parts, strict=True):
                found = self.tensors.shape(name)
                if found != list(part.shape):
                    raise ValueError(
                        f"{self.path}: {name} has shape {found}, but config.json implies {list(part.shape)}"
                    )
        extra = self.tensors.unread(FAMILIES[self.values["model_type"]].ignored)
        if extra:
            shown = ", ".join(extra[:5])
            if len(extra) > 5:
                shown += f" and {len(extra) - 5} more"
            raise ValueError(f"{self.path} contains tensors that are not part of the model in config.json: {shown}")

    def check_tokenizer(self, tokenizer: Any) -> list[str]:
        """Compare a tokenizer with the model's config.json as `hf_config.check_tokenizer` does; return notes."""
        return check_tokenizer(self.values, self.given, tokenizer, self.path / "config.json")

    @torch.no_grad()
    def load(self, model: Any) -> None:
        """Load this process's shards of the parameters into `model`."""
        matches = {match.ours: match for match in self.matches}
        for name, parameter in global_parameters(model):
            match = matches[name]
            whole = match.join([self.tensors.read(each) for each in match.theirs])
            mpu.spec_of(parameter).put(whole, parameter)
