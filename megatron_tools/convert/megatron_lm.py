"""GPT checkpoints with one pickled file per model-parallel rank: CPM-1, CPM-Pretrain, Megatron-LM, DeepSpeed.

80000/mp_rank_00_model_states.pt            CPM-1 (two ranks for CPM-1-large) and DeepSpeed: weights under key "module"
iter_0001000/mp_rank_00/model_optim_rng.pt  Megatron-LM: under key "model"; mp_rank_00_001 is the second pipeline stage
1000/layer_03-model_00-model_states.pt      DeepSpeed pipeline: one layer's weights; mp_rank_00_* has no weights
"""

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .convert_flags import QKV_ORDERS
from .hf_names import swap_order
from .plain_pickle import load_plain

FileContent = Mapping[str, Any]
# Names of files. A name without a rank or a stage is that of the first, 0.
_RANK_FILES = (
    re.compile(r"mp_rank_(?P<rank>\d\d)_model_states\.pt"),
    re.compile(r"mp_rank_(?P<rank>\d\d)(?:_(?P<stage>\d\d\d))?/model\w*\.pt"),
)
_LAYER_FILE = re.compile(r"layer_(?P<stage>\d+)(?:-model_(?P<rank>\d\d))?-model_states\.pt")
# Column-parallel parameters are split in dim 0, row-parallel ones in dim 1.
_COLUMN_PARALLEL = re.compile(r"word_embeddings\.weight|query_key_value\.\w+|dense_h_to_4h\.\w+")
_ROW_PARALLEL = re.compile(r"(attention\.dense|dense_4h_to_h)\.weight")
_NO_PARAMETERS = re.compile(r"\.attention\.(bias|masked_bias)$|\._extra_state$")  # mask buffers and states of FP8
_EMBEDDING = "embedding.word_embeddings.weight"
# Part of a name in models of Megatron Core and earlier ones -> our part, replaced in this order: the first entry
# changes names that later entries then find. Transformer Engine fuses norms with the layers behind them.
_OUR_PARTS = {
    "self_attention.": "attention.",
    "final_layernorm": "final_norm.norm",
    "attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "post_attention_layernorm.",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "linear_qkv": "query_key_value",
    "linear_proj": "dense",
    "linear_fc1": "dense_h_to_4h",
    "linear_fc2": "dense_4h_to_h",
}


class RankFiles:
    """Reader of a checkpoint's tensors by our names; `read` joins the shards of the model-parallel ranks.

    version: checkpoint version 0 to 3, which determines the order of query, key and value rows. It is needed if the
    files do not record the version. layers: number of layers in the model. It is needed if the checkpoint has one file
    per layer and does not record the number.
    Raises ValueError for unknown folders, files or names, and if the version cannot be determined.
    """

    def __init__(self, folder: Path, version: int | None = None, layers: int | None = None) -> None:
        self.folder = _tracked_folder(folder)
        paths = self._find_files("layer_*.pt", _LAYER_FILE)
        self.is_by_layer = bool(paths)
        rank_paths = self._find_files("mp_rank_*.pt", _RANK_FILES[0])
        if not self.is_by_layer:
            paths = rank_paths | self._find_files("mp_rank_*/*.pt", _RANK_FILES[1])
        if not paths:
            raise ValueError(
                f"{self.folder} contains neither mp_rank_00_model_states.pt nor mp_rank_00/model_optim_rng.pt, "
                "nor layer_00-model_00-model_states.pt"
            )
        # For files by layer, a `stage` is the number of a layer file: 3 for layer_03-model_00-model_states.pt.
        stages = sorted({stage for stage, _ in paths})
        self.ranks = 1 + max(rank for _, rank in paths)
        # Numbers of layer files have gaps, because some pipeline layers have no weights; stages have none.
        expected_stages = stages if self.is_by_layer else range(stages[-1] + 1)
        kind = "layer" if self.is_by_layer else "stage"
        for stage, rank in product(expected_stages, range(self.ranks)):
            if (stage, rank) not in paths:
                raise ValueError(f"{self.folder} lacks the file of model-parallel rank {rank}, {kind} {stage}")
        # A file's content is also its header: the file of the weights has the settings and the version, except with
        # files by layer (see below).
        headers = list(map(load_plain, paths.values()))
        contents = dict(zip(paths, headers, strict=True))
        self._shards_by_rank: dict[str, dict[int, Tensor]] = {}
        self._foreign_names: set[str] = set()
        self.layers = 0  # number of transformer blocks in the files
        block_stages: list[int] = []
        for rank in range(self.ranks):
            files = [(stage, contents[stage, rank], paths[stage, rank]) for stage in stages]
            # All ranks hold the same layers, so the result of the last rank serves for all.
            block_stages = self._add_rank(rank, files)
        if self.is_by_layer:
            # The settings (args) of files by layer are in DeepSpeed's mp_rank_* files, and reading one suffices.
            first_paths = list(rank_paths.values())[:1]
            headers = list(map(load_plain, first_paths))
        saved_args = headers[0].get("args") if headers else None
        self.settings = vars(saved_args) if isinstance(saved_args, argparse.Namespace) else {}
        # A stage's file holds all its layers, but of files by layer the last ones may be missing.
        is_complete = not self.is_by_layer or _is_full_cpm_pretrain(stages, block_stages)
        self._check_layers(layers, is_complete)
        self.version, self.version_source = self._version_of(headers, version)

    def _add_rank(self, rank: int, files: Sequence[tuple[int, FileContent, Path]]) -> list[int]:
        """Store the tensors of a rank; return the pipeline stages, or layer files, that hold transformer blocks.

        files: (stage or layer, content, path) of each file, in the order of the model.
        """
        num_layers = 0  # number of transformer blocks in the files so far
        block_stages = []
        for stage, content, path in files:
            first_layer = num_layers
            num_layers = self._add_file(content, path, rank, first_layer)
            if num_layers > first_layer:
                block_stages.append(stage)
        # A gap between the numbers of the files with transformer blocks means that a file is missing.
        consecutive = range(min(block_stages, default=0), max(block_stages, default=0) + 1)
        if self.is_by_layer and block_stages != list(consecutive):
            raise ValueError(f"{self.folder} lacks layers: only the files {block_stages} contain transformer blocks")
        self.layers = max(self.layers, num_layers)
        return block_stages

    def _check_layers(self, given_layers: int | None, is_complete: bool) -> None:
        """Raise ValueError if the number of layers contradicts the settings or --num-layers, or may be too small.

        is_complete: whether the files are complete, although they record no number of layers.
        """
        known_layers = self.settings.get("num_layers", given_layers)  # by the files, else by --num-layers
        if known_layers is None and not is_complete:
            raise ValueError(
                f"{self.folder} does not record the number of layers (there are files of "
                f"{self.layers} layers); give --num-layers"
            )
        for expected in (known_layers, given_layers):
            if expected not in (None, self.layers):
                raise ValueError(
                    f"{self.folder} contains {self.layers} layers, but its settings or --num-layers give {expected}"
                )

    def _find_files(self, glob: str, pattern: re.Pattern[str]) -> dict[tuple[int, int], Path]:
        """Return the files of `glob` whose whole path matches `pattern`, as (stage or layer, rank) -> path."""
        paths: dict[tuple[int, int], Path] = {}
        for path in sorted(self.folder.glob(glob)):
            match = pattern.fullmatch(path.relative_to(self.folder).as_posix())
            if not match:
                continue
            groups = match.groupdict()
            position = (int(groups.get("stage") or 0), int(groups.get("rank") or 0))
            first_path = paths.setdefault(position, path)
            if first_path != path:
                raise ValueError(f"{first_path} and {path.name} belong to the same rank; remove one of them")
        return paths

    def _version_of(self, headers: Sequence[FileContent], given_version: int | None) -> tuple[float, str]:
        """Return (checkpoint version, words for where it comes from).

        The sources are the files, else --checkpoint-version, else tensor names that tell which program wrote the files.
        """
        versions = []
        for header in headers:
            version = header.get("checkpoint_version")
            if version is not None:
                versions.append(version)
        if versions:
            recorded = versions[0]
            if recorded not in (0, 1, 2, 3) or any(version != recorded for version in versions):
                raise ValueError(f"{self.folder}: checkpoint version {recorded} is unknown or differs between files")
            if given_version is not None and given_version != recorded:
                raise ValueError(
                    f"{self.folder} has checkpoint version {recorded:g}, but --checkpoint-version is {given_version}"
                )
            return float(recorded), "recorded in the files"
        if given_version is not None:
            return float(given_version), "from --checkpoint-version"
        # Neither the files nor the user give a version. The names of the tensors identify only some programs.
        if "position_embedding.weight" in self._foreign_names:
            return 2.0, "from this project's tensor names"
        cpm_names = {"word_embeddings.weight", "transformer.layers.0.input_layernorm.weight"}
        if not self.is_by_layer and cpm_names <= self._foreign_names:
            return 0.0, "from CPM-1's tensor names"
        is_megatron = bool(headers) and "model" in headers[0]  # Megatron-LM's key for weights; DeepSpeed's is "module"
        if is_megatron and any(name.startswith("language_model.transformer.") for name in self._foreign_names):
            return 0.0, "Megatron-LM's default for files that record no version"
        raise ValueError(
            f"{self.folder} does not record the order of query, key and value; give --checkpoint-version {QKV_ORDERS}"
        )

    def _add_file(self, content: FileContent, path: Path, rank: int, first_layer: int) -> int:
        """Store one file's tensors. Return the number of its last layer plus 1, or `first_layer` if it has no layer.

        first_layer: number in the whole model of the file's first layer.
        """
        weights = _layer_tensors(content) if self.is_by_layer else content.get("module", content.get("model"))
        if not isinstance(weights, Mapping):
            raise ValueError(f"{path} contains weights under neither 'module' nor 'model'")
        num_layers = first_layer
        for name, tensor in _flatten(weights):
            self._foreign_names.add(re.sub(r"^module\.", "", name))
            # None stands for entries that are not parameters, and an empty name for an unknown tensor.
            target_name = our_name(name, first_layer)
            if target_name is None or not isinstance(tensor, Tensor):
                continue
            if not target_name:
                raise ValueError(f"{path}: the tensor {name} of shape {list(tensor.shape)} is unknown")
            if not tensor.is_floating_point():
                raise ValueError(f"{path}: {name} has dtype {tensor.dtype}; save it as floating point")
            # Count the layers: layers.5 shows that there are at least 6.
            layer_match = re.match(r"layers\.(\d+)\.", target_name)
            if layer_match:
                num_layers = max(num_layers, int(layer_match[1]) + 1)
            # The last pipeline stage has second copies of both embeddings: it computes the logits with its copy of the
            # word embedding, and does not use that of the position embedding. The first copies are imported.
            shard_of_rank = self._shards_by_rank.setdefault(target_name, {})
            first_copy = shard_of_rank.setdefault(rank, tensor)
            if target_name == _EMBEDDING and first_copy is not tensor and not _nearly_equal(first_copy, tensor):
                raise ValueError(
                    f"{path}: {name} differs from the embedding; untied output embeddings are not supported"
                )
        return num_layers

    def names(self) -> list[str]:
        """Return our names of all tensors in the files."""
        return list(self._shards_by_rank)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape that tensor `name` has when the ranks' shards are joined."""
        shape = list(self._shards(name)[0].shape)
        dim = _split_dim(name)
        # A damaged tensor may lack the dimension; `check_complete` then refuses its shape.
        if dim is not None and dim < len(shape):
            shape[dim] *= self.ranks
        return tuple(shape)

    def read(self, name: str, heads: int) -> Tensor:
        """Join the ranks' shards of tensor `name`; return it in fp32.

        heads: number of attention heads. Rows of query, key and value are reordered to our order, see `order_by_heads`.
        """
        shards = self._shards(name)
        dim = _split_dim(name)
        if dim is None:
            return shards[0].float()
        shards = [shard.float() for shard in shards]
        # Each rank has the queries, keys and values of its share of the heads.
        if "query_key_value" in name:
            shards = [order_by_heads(shard, heads // self.ranks, self.version) for shard in shards]
        return torch.cat(shards, dim)

    def _shards(self, name: str) -> list[Tensor]:
        if name not in self._shards_by_rank:
            raise ValueError(f"{self.folder} contains no tensor for {name}")
        shards_of_name = self._shards_by_rank[name]
        if len(shards_of_name) != self.ranks:
            raise ValueError(
                f"{self.folder}: {name} is in the files of only {len(shards_of_name)} of {self.ranks} ranks"
            )
        return [shards_of_name[rank] for rank in range(self.ranks)]


def _is_full_cpm_pretrain(stages: Sequence[int], block_stages: Sequence[int]) -> bool:
    """Return whether the files are a complete CPM-Pretrain pipeline.

    Its pipeline layers are, numbered from 0: cast, embedding, transpose, the transformer blocks, a layer without
    weights, final norm, output head. Layers without weights have no files.
    """
    # Two blocks: the layers 1 (embedding), 3 and 4 (blocks), 6 (norm) and 7 (head) have weights.
    last_stage = len(block_stages) + 5
    blocks = range(3, last_stage - 2)
    return list(stages) == [1, *blocks, last_stage - 1, last_stage]


def _layer_tensors(content: FileContent) -> dict[str, Any]:
    """Return the tensors of a layer file, named as in the whole model.

    The file contains a transformer block, the embedding or the final norm.
    """
    prefix = ""
    if set(content) == {"weight", "bias"}:
        prefix = "final_layernorm."
    elif any(name.startswith("input_layernorm.") for name in content):
        # `our_name` adds the number of the file's first layer.
        prefix = "layers.0."
    return {prefix + name: tensor for name, tensor in content.items()}


def _nearly_equal(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are equal up to rounding, like two copies of a weight that were updated separately."""
    if first.shape != second.shape:
        return False
    first = first.float()
    difference = (first - second.float()).abs().max()
    return bool(difference <= 1e-3 * first.abs().max())


def _tracked_folder(folder: Path) -> Path:
    """Return the subfolder that Megatron's or DeepSpeed's tracker file names, else `folder` itself."""
    for tracker in (folder / "latest_checkpointed_iteration.txt", folder / "latest"):
        if not tracker.is_file():
            continue
        tag = tracker.read_text(encoding="utf-8").strip()
        folder_names = [tag]
        if tag.isdigit():
            folder_names += [f"iter_{int(tag):07d}", f"global_step{int(tag)}"]
        for folder_name in folder_names:
            if (folder / folder_name).is_dir():
                return folder / folder_name
        raise ValueError(f"{tracker} names {tag}, which does not exist")
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    return folder


def _flatten(tree: FileContent, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def our_name(name: str, first_layer: int = 0) -> str | None:
    """Return our name for the foreign parameter `name`; None for entries that are not parameters, "" if unknown.

    first_layer: number that is added to the layer number in `name`.
    """
    if _NO_PARAMETERS.search(name):
        return None
    # Up to three prefixes precede a name: module.language_model.encoder.layers.0.mlp... becomes layers.0.mlp...
    name = re.sub(r"^((module|model|language_model)\.)?(language_model\.)?((transformer|encoder|decoder)\.)?", "", name)
    for their_part, our_part in _OUR_PARTS.items():
        name = name.replace(their_part, our_part)
    layer = re.fullmatch(
        r"layers\.(\d+)\.((input_layernorm|post_attention_layernorm|attention\.query_key_value|attention\.dense|"
        r"mlp\.dense_h_to_4h|mlp\.dense_4h_to_h)\.(weight|bias))",
        name,
    )
    if layer:
        return f"layers.{int(layer[1]) + first_layer}.{layer[2]}"
    return {
        "word_embeddings.weight": _EMBEDDING,
        "embedding.word_embeddings.weight": _EMBEDDING,
        "word_embeddings_for_head.weight": _EMBEDDING,
        "lm_head.weight": _EMBEDDING,
        "output_layer.weight": _EMBEDDING,
        "position_embeddings.weight": "position_embedding.weight",
        "position_embedding.weight": "position_embedding.weight",
        "embedding.position_embeddings.weight": "position_embedding.weight",
        "final_norm.norm.weight": "final_norm.norm.weight",
        "final_norm.norm.bias": "final_norm.norm.bias",
    }.get(name, "")


def _split_dim(name: str) -> int | None:
    """Return the dimension along which a tensor is split over ranks, or None for a replicated tensor."""
    if _ROW_PARALLEL.search(name):
        return 1
    return 0 if _COLUMN_PARALLEL.search(name) else None


def order_by_heads(rows: Tensor, heads: int, version: float) -> Tensor:
    """Reorder a rank's query, key and value rows from the order of a checkpoint version to our order.

    Version 0: all queries, all keys, all values. Version 1: query, key and value for each feature of each head.
    Versions 2 and 3: query, key and value for each head, which is our order.
    """
    if version < 1:
        return swap_order(rows, 3, heads)
    if version < 2:
        by_feature = rows.view(heads, -1, 3, *rows.shape[1:])
        return by_feature.transpose(1, 2).reshape(rows.shape)
    return rows
