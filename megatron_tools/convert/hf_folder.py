"""Reading and writing of Hugging Face folders (config.json and safetensors files), one tensor at a time."""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_utils.cli import write_json
from megatron import mpu
from megatron.atomic import why_missing
from megatron.checkpointing.bounds import refuse_absurd_sizes
from megatron.checkpointing.checksums import preferred_checksum
from megatron.checkpointing.stream import LazyTensor, open_tensors, write_tensor_file
from megatron.config import Config
from megatron.config.command_line import with_values
from megatron.config.fields import ConfigError
from megatron.config.messages import shorten_list
from megatron.model.layers import global_parameters
from megatron.tokenizer import Tokenizer, load_tokenizer
from megatron.tokenizer.base import read_object
from megatron.tokenizer.load import check_same_ids, has_vocab_file
from megatron_tools.shapes import whole_shapes

from .hf_config import FAMILIES, check_tokenizer, logit_scale_notes, read_config, settings_from_hf, unread_keys
from .hf_names import Match, parameter_matches

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")  # float dtypes as safetensors names them
HEAD_NAME = "lm_head.weight"
# Names under which the files may contain the embedding matrix.
EMBEDDING_NAMES = (
    "transformer.wte.weight", "model.embed_tokens.weight", "shared.weight", "encoder.embed_tokens.weight",
    "decoder.embed_tokens.weight", HEAD_NAME,
)  # fmt: skip
# Files saved from a model without a head (GPT2Model) omit this prefix.
MODEL_PREFIX = re.compile(r"^(transformer|model)\.")
CONSTANT_TENSORS = re.compile(
    r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias|(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
)
ExpertRows = tuple[int, slice]  # number of an expert, and rows of its matrix
# Tensors of transformers 5 that hold the matrices of all experts: [e, 2f, h] and [e, h, f]
FUSED_EXPERTS = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)")
# Mixtral's names of tensors -> names in transformers 5, which its files have if they hold FUSED_EXPERTS.
RENAMED_EXPERTS = {".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}


def write_tensors(folder: Path, entries: Sequence[LazyTensor], max_shard_bytes: int) -> None:
    """Write model.safetensors, or several shards and their index if the size exceeds `max_shard_bytes`.

    At most one tensor is in memory at a time.
    """
    shards: list[list[LazyTensor]] = [[]]
    shard_bytes = 0
    for entry in entries:
        if shards[-1] and shard_bytes + entry.num_bytes > max_shard_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(entry)
        shard_bytes += entry.num_bytes
    if len(shards) == 1:
        write_tensor_file(folder / "model.safetensors", shards[0], preferred_checksum())
        return
    file_of_tensor = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensor_file(folder / file_name, shard, preferred_checksum())
        for entry in shard:
            file_of_tensor[entry.name] = file_name
    total = sum(entry.num_bytes for entry in entries)
    index = {"metadata": {"total_size": total}, "weight_map": file_of_tensor}
    write_json(folder / "model.safetensors.index.json", index)


class HFTensorReader:
    """Reader of the tensors in a Hugging Face folder, one at a time and by name.

    Raises ValueError if the folder has only pickled weights, or if a tensor is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open = cache(partial(_open_file, folder))  # function that opens each file once, given its name
        self._used_names: set[str] = set()  # names of stored tensors that `shape` or `read` has used
        index = folder / "model.safetensors.index.json"
        single = (folder / "model.safetensors").is_file()
        if index.is_file():
            weight_map: Any = read_object(index).get("weight_map")
            # For anything but a dict, a None takes the place of the names, so that the loop refuses it.
            files = weight_map.values() if isinstance(weight_map, dict) else [None]
            for file in files:
                if not isinstance(file, str) or file != Path(file).name:
                    raise ValueError(
                        f"{index}: weight_map must map each tensor to the name of a file in the same folder"
                    )
            self._file_of: dict[str, str] = dict(weight_map)  # name of a stored tensor -> file name
            if single and set(self._file_of.values()) != {"model.safetensors"}:
                raise ValueError(
                    f"{folder} contains model.safetensors and a model.safetensors.index.json that lists other files; "
                    f"remove the one that is left over from another model (transformers reads model.safetensors)"
                )
        elif single:
            # All tensors are in this one file.
            self._file_of = dict.fromkeys(self._open("model.safetensors").keys(), "model.safetensors")
        else:
            _refuse_broken_links(folder / "model.safetensors", index)
            raise ValueError(
                f"{folder} contains no model.safetensors; pickled weights are not read, so save them with "
                f"save_pretrained(..., safe_serialization=True)"
            )
        # name of an expert's matrix -> (tensor of FUSED_EXPERTS that holds it, its place in the tensor)
        self._expert_slices: dict[str, tuple[str, ExpertRows]] = {}
        for name in list(self._file_of):  # a copy, because `_add_experts` changes the dict
            match = FUSED_EXPERTS.fullmatch(name)
            if match:
                self._add_experts(name, *match.groups())

    def _add_experts(self, fused_name: str, prefix: str, fused_kind: str) -> None:
        """Add the matrices of each expert to the known tensors, and remove `fused_name`, the tensor that holds them."""
        file = self._open(self._file_of[fused_name])
        # The index may list a tensor that the file lacks; `_locate` reports it later.
        if fused_name not in file.keys():  # noqa: SIM118
            return
        shape = file.get_slice(fused_name).get_shape()
        # A tensor of another shape is no stack of matrices. It stays as it is, and a later check refuses its name.
        if len(shape) != 3 or 0 in shape:
            return
        # The rows of gate_up_proj are those of the gate projection, then those of the up projection.
        half = shape[1] // 2
        rows_of = {fused_kind: slice(None)}  # projection -> its rows; down_proj has all rows
        if fused_kind == "gate_up_proj":
            rows_of = {"gate_proj": slice(0, half), "up_proj": slice(half, None)}
        file_name = self._file_of.pop(fused_name)
        for expert in range(shape[0]):
            for projection, rows in rows_of.items():
                matrix_name = f"{prefix}{expert}.{projection}.weight"
                self._file_of[matrix_name] = file_name
                self._expert_slices[matrix_name] = fused_name, (expert, rows)

    def _stored_name(self, name: str) -> str | None:
        """Return the name that the files use for tensor `name`, or None if they do not contain this tensor.

        Files may omit the prefix `transformer.` or `model.`, may use any name in EMBEDDING_NAMES for the embedding, and
        may have either of two names for the tensors of Mixtral's experts.
        """
        candidates = [name]
        if ".block_sparse_moe." in name:
            new_name = name
            for old, replacement in RENAMED_EXPERTS.items():
                new_name = new_name.replace(old, replacement)
            candidates.append(new_name)
        # The input embedding may have any of these names, even that of a tied head. The head itself has only one name.
        if name in EMBEDDING_NAMES and name != HEAD_NAME:
            candidates += EMBEDDING_NAMES
        for candidate in candidates:
            for stored_name in (candidate, MODEL_PREFIX.sub("", candidate)):
                if stored_name in self._file_of:
                    return stored_name
        return None

    def shapes(self) -> list[list[int]]:
        """Return the shapes of all tensors in the folder's files."""
        files = list(map(self._open, sorted(set(self._file_of.values()))))
        return [file.get_slice(name).get_shape() for file in files for name in file.keys()]  # noqa: SIM118

    def contains(self, name: str) -> bool:
        """Return whether the files contain tensor `name`, with or without the prefix `transformer.` or `model.`."""
        return name in self._file_of or MODEL_PREFIX.sub("", name) in self._file_of

    def unused_tensors(self, ignored: Sequence[str]) -> list[str]:
        """Return the names of tensors that neither `shape` nor `read` has used so far, except redundant tensors.

        Redundant tensors are copies of the embedding, constants that old versions of transformers saved, and tensors
        whose name matches a pattern in `ignored`.
        """
        # Files may omit the prefix of a name (see MODEL_PREFIX).
        embeddings = set(EMBEDDING_NAMES)
        for name in EMBEDDING_NAMES:
            embeddings.add(MODEL_PREFIX.sub("", name))
        unused_names = set(self._file_of) - self._used_names - embeddings
        unused = []
        for name in sorted(unused_names):
            is_redundant = CONSTANT_TENSORS.fullmatch(name) or any(re.search(pattern, name) for pattern in ignored)
            if not is_redundant:
                unused.append(name)
        return unused

    def _locate(self, name: str) -> tuple[Any, str, ExpertRows | None]:
        """Return (file that holds a tensor, name of the stored tensor, expert and rows if the tensor is a part of it).

        The last value is None for a tensor that is stored as it is.
        """
        stored_name = self._stored_name(name)
        if stored_name is None:
            raise ValueError(f"{self.folder} contains no tensor {name}")
        self._used_names.add(stored_name)
        file_name = self._file_of[stored_name]
        file = self._open(file_name)
        # The matrix of an expert may lie in a stack of all experts, which has another name.
        tensor_name, expert_rows = self._expert_slices.get(stored_name, (stored_name, None))
        if tensor_name not in file.keys():  # noqa: SIM118
            raise ValueError(
                f"{self.folder / file_name} lacks {tensor_name}, which model.safetensors.index.json places in this file"
            )
        dtype = file.get_slice(tensor_name).get_dtype()
        if dtype not in FLOAT_DTYPES:
            raise ValueError(
                f"{self.folder / file_name}: {tensor_name} is quantized ({dtype}); save the model again in one of "
                f"{', '.join(FLOAT_DTYPES)}"
            )
        return file, tensor_name, expert_rows

    def shape(self, name: str) -> list[int]:
        """Return the shape of a tensor. Raises ValueError if it is quantized."""
        file, tensor_name, expert_rows = self._locate(name)
        shape: list[int] = file.get_slice(tensor_name).get_shape()
        if expert_rows is None:
            return shape
        _, rows = expert_rows
        # The stack is [e, rows, columns], and the slice `rows` takes all rows of an expert or half of them: of 8 rows,
        # slice(4, None) takes len(range(8)[4:]) = 4.
        return [len(range(shape[1])[rows]), shape[2]]

    def read(self, name: str) -> Tensor:
        """Return the tensor `name`, converted to fp32. Raises ValueError if it is quantized."""
        file, tensor_name, expert_rows = self._locate(name)
        tensor: Tensor
        if expert_rows is None:
            tensor = file.get_tensor(tensor_name)
        else:
            tensor = file.get_slice(tensor_name)[expert_rows]
        return tensor.float()


def _open_file(folder: Path, name: str) -> Any:
    _refuse_broken_links(folder / name)
    return open_tensors(folder / name)


def _refuse_broken_links(*paths: Path) -> None:
    """Raise ValueError for a link to a file that does not exist, as in an incomplete cache of Hugging Face."""
    for path in paths:
        if path.is_symlink() and not path.exists():
            raise ValueError(f"{path} {why_missing(path)}: download the model again, or copy the whole cache")


def export_entries(
    matches: Iterable[Match], read_weight: Callable[[str], Tensor], shape_of: Callable[[str], Sequence[int]], dtype: str
) -> list[LazyTensor]:
    """Return one entry for each Hugging Face tensor, which is computed from our tensor when the entry is written.

    read_weight, shape_of: functions that return our tensor and its shape by name. Writing raises ValueError if a value
    overflows `dtype`.
    """
    entries = []
    for match in matches:
        # Splitting a meta tensor with the shape of our tensor gives Hugging Face's shapes without reading weights.
        parts = match.split(torch.empty(*shape_of(match.our_name), device="meta"))
        # `split` returns parts in the order of `their_names`. Each entry later reads the weight and splits it again.
        for index, part in enumerate(parts):
            compute = partial(_export_part, match, index, read_weight, dtype)
            entries.append(LazyTensor(match.their_names[index], tuple(part.shape), DTYPES[dtype], compute))
    return entries


def _export_part(match: Match, index: int, read_weight: Callable[[str], Tensor], dtype: str) -> Tensor:
    """Return one Hugging Face tensor of a match. Raises ValueError if a value overflows `dtype`."""
    tensor = match.split(read_weight(match.our_name))[index]
    # An Inf that a weight already has is no overflow, and is exported as it is.
    if tensor.isfinite().all() and not tensor.to(DTYPES[dtype]).isfinite().all():
        largest = float(tensor.abs().max())
        raise ValueError(
            f"{match.their_names[index]} reaches {largest:.3g}, which overflows {dtype}; choose another --dtype"
        )
    return tensor


def is_hf_folder(folder: Path) -> bool:
    """Return whether a folder holds a Hugging Face model. A run directory's config.json has no model_type."""
    path = folder / "config.json"
    return path.is_file() and "model_type" in read_object(path)


def check_vocab_file(folder: Path, tokenizer: Tokenizer, vocab_file: str | None) -> None:
    """Raise TokenizerError if the tokenizer of --vocab-file, if given, has other ids than that of the HF `folder`."""
    if vocab_file and has_vocab_file(folder):
        own_tokenizer = load_tokenizer(str(folder))
        check_same_ids(tokenizer, own_tokenizer, f"{vocab_file} is not the tokenizer of {folder}")


class HFModelFolder:
    """A Hugging Face model in a folder: its settings and tensors, checked against each other.

    values: config.json with defaults filled in. config: the same settings as this project's Config. notes: remarks for
    the user. Raises ValueError if the model cannot be converted, if files contradict each other, or if the model does
    not use a tensor.
    """

    def __init__(self, path: Path, model_parallel_size: int = 1, pipe_parallel_size: int = 0) -> None:
        self.path = path
        config_path = path / "config.json"
        _refuse_broken_links(config_path)
        if not config_path.is_file():
            raise ValueError(f"{config_path} does not exist: {path} is not a Hugging Face model")
        self.config_json = read_object(config_path)
        self.values = read_config(self.config_json, config_path)
        self.tensors = HFTensorReader(path)
        refuse_absurd_sizes(self.values, self.tensors.shapes(), config_path)
        settings, self.notes = settings_from_hf(self.values, self._has_tied_embeddings(), config_path)
        unread = unread_keys(self.config_json)
        if unread:
            self.notes.append(
                f"{config_path} has keys without effect on {self.values['model_type']} models: {', '.join(unread)}"
            )
        settings |= {
            "model_parallel_size": model_parallel_size,
            "pipe_parallel_size": pipe_parallel_size,
            "sequence_parallel": False,  # Sequence parallelism would restrict the lengths of texts.
        }
        try:
            self.config = with_values(Config(), settings)
        except ConfigError as error:
            raise ValueError(f"{config_path}: {error}") from None
        self.notes += logit_scale_notes(self.config.model)
        self.matches = list(parameter_matches(self.config.model))
        self._check_tensors()

    def _are_equal(self, first_name: str, second_name: str) -> bool:
        """Return whether two tensors are equal; a NaN equals a NaN."""
        first = self.tensors.read(first_name)
        second = self.tensors.read(second_name)
        return first.shape == second.shape and torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)

    def _has_tied_embeddings(self) -> bool:
        """Return whether input and output embedding are tied: tie_word_embeddings is true and the tensors are equal."""
        # The files may hold several copies of the input embedding, which must be equal.
        contains_head = self.tensors.contains(HEAD_NAME)
        first_name = None  # the first name of the input embedding that the files contain
        for name in EMBEDDING_NAMES:
            if name == HEAD_NAME or not self.tensors.contains(name):
                continue
            first_name = first_name or name
            if not self._are_equal(name, first_name):
                raise ValueError(
                    f"{self.path}: {name} and {first_name} differ, but this project's models have one input embedding"
                )
        is_tied = bool(self.values["tie_word_embeddings"])
        # transformers 5 writes true even for untied weights. False also counts for equal matrices, which training makes
        # different.
        if first_name and contains_head:
            return is_tied and self._are_equal(HEAD_NAME, first_name)
        # The files lack the head or the input embedding. Tied embeddings need only one of them.
        if not is_tied:
            missing = HEAD_NAME if first_name else "embedding"
            raise ValueError(
                f"{self.path}/config.json has tie_word_embeddings false, but the files contain no {missing}"
            )
        return True

    def _check_tensors(self) -> None:
        """Raise ValueError unless the files hold all tensors of the model, with the right shapes, and no others."""
        shapes = whole_shapes(self.config)
        for match in self.matches:
            # Splitting an empty meta tensor gives the shapes of their tensors.
            parts = match.split(torch.empty(*shapes[match.our_name], device="meta"))
            for name, part in zip(match.their_names, parts, strict=True):
                shape = self.tensors.shape(name)  # also marks the tensor as used
                if shape != list(part.shape):
                    raise ValueError(
                        f"{self.path}: {name} has shape {shape}, but config.json implies {list(part.shape)}"
                    )
        unused = self.tensors.unused_tensors(FAMILIES[self.values["model_type"]].ignored)
        if unused:
            raise ValueError(
                f"{self.path} contains tensors that are not part of the model in config.json: {shorten_list(unused, 5)}"
            )

    def check_tokenizer(self, tokenizer: Any) -> list[str]:
        """Compare a tokenizer with the model's config.json as `hf_config.check_tokenizer` does; return notes."""
        return check_tokenizer(self.values, self.config_json, tokenizer, self.path / "config.json")

    @torch.no_grad()
    def load(self, model: Any) -> None:
        """Load this process's shards of the parameters into `model`."""
        matches = {match.our_name: match for match in self.matches}
        for name, parameter in global_parameters(model):
            match = matches[name]
            value = match.join(list(map(self.tensors.read, match.their_names)))
            mpu.spec_of(parameter).put(value, parameter)
