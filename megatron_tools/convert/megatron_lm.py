"""GPT checkpoints with one pickled file per model-parallel rank: CPM-1, CPM-Pretrain, early Megatron-LM, DeepSpeed.

80000/mp_rank_00_model_states.pt            CPM-1 (two ranks for CPM-1-large) and DeepSpeed: weights under key "module"
iter_0001000/mp_rank_00/model_optim_rng.pt  Megatron-LM: under key "model"; mp_rank_00_001 is the second pipeline stage
1000/layer_03-model_00-model_states.pt      DeepSpeed pipeline: one layer's weights; mp_rank_00_* has no weights
"""

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .plain_pickle import load_plain

Given = Mapping[str, Any]
_FILES = (re.compile(r"mp_rank_(\d\d)_model_states\.pt"), re.compile(r"mp_rank_(\d\d)(?:_(\d\d\d))?/model\w*\.pt"))
_LAYER_FILE = re.compile(r"layer_(\d+)(?:-model_(\d\d))?-model_states\.pt")
_COLUMN = re.compile(
    r"word_embeddings\.weight|query_key_value\.\w+|dense_h_to_4h\.\w+"
)  # column-parallel: split in dim 0
_ROW = re.compile(r"(attention\.dense|dense_4h_to_h)\.weight")  # row-parallel: split in dim 1
_SKIP = re.compile(r"\.attention\.(bias|masked_bias)$")
_EMBEDDING = "embedding.word_embeddings.weight"

ORDERS = (
    "0 (all queries, all keys, all values), 1 (for each head and feature: query, key, value) "
    "or 2 or 3 (for each head: query, key, value)"
)


class RankFiles:
    """Reader of a checkpoint's tensors by our names; `read` joins the shards of the model-parallel ranks.

    version: checkpoint version 0 to 3, which determines the order of query, key and value rows. It is needed if the
    files do not record the version. layers: number of layers in the model. It is needed if the checkpoint has one file
    per layer and does not record the number.
    Raises ValueError for unknown folders, files or names, and if the version cannot be determined.
    """

    def __init__(self, folder: Path, version: int | None = None, layers: int | None = None) -> None:
        self.folder = _newest(folder)
        found = self._files(_LAYER_FILE, lambda m: (int(m[1]), int(m[2] or 0)))
        self.by_layer = bool(found)
        nearby = self._files(_FILES[0], lambda m: (0, int(m[1])))
        if not self.by_layer:
            found = nearby | self._files(_FILES[1], lambda m: (int(m[2] or 0), int(m[1])))
        if not found:
            raise ValueError(
                f"{self.folder} contains neither mp_rank_00_model_states.pt nor mp_rank_00/model_optim_rng.pt, "
                "nor layer_00-model_00-model_states.pt"
            )
        stages = sorted({stage for stage, _ in found})
        self.ranks = 1 + max(rank for _, rank in found)
        self._refuse_missing(found, stages if self.by_layer else range(stages[-1] + 1))
        headers = list(map(load_plain, found.values()))
        contents = dict(zip(found, headers, strict=True))
        self._parts: dict[str, dict[int, Tensor]] = {}
        self._theirs: set[str] = set()
        blocks: list[int] = []
        for rank in range(self.ranks):
            files = [(stage, contents[stage, rank], found[stage, rank]) for stage in stages]
            blocks = self._add_rank(rank, files)
        if self.by_layer:
            # The settings (args) of files by layer are in DeepSpeed's mp_rank_* files, and reading one suffices.
            headers = list(map(load_plain, list(nearby.values())[:1]))
        known = headers[0].get("args") if headers else None
        self.settings: dict[str, Any] = vars(known) if isinstance(known, argparse.Namespace) else {}
        self._check_layers(layers, not self.by_layer or _as_cpm_pretrain(stages, blocks))
        self.version, self.version_source = self._version_of(headers, version)

    def _refuse_missing(self, found: Mapping[tuple[int, int], Path], stages: Iterable[int]) -> None:
        """Raise ValueError unless each rank has a file of each pipeline stage, or of each layer."""
        what = "layer" if self.by_layer else "stage"
        for stage in stages:
            for rank in range(self.ranks):
                if (stage, rank) not in found:
                    raise ValueError(f"{self.folder} lacks the file of model-parallel rank {rank}, {what} {stage}")

    def _add_rank(self, rank: int, files: Sequence[tuple[int, Given, Path]]) -> list[int]:
        """Store the tensors of a rank; return the pipeline stages, or layer files, that hold transformer blocks.

        files: (stage or layer, content, path) of each file, in the order of the model.
        """
        top = 0  # number of transformer blocks in the files so far
        blocks = []
        for stage, content, path in files:
            first = top
            top = self._add(content, path, rank, first)
            if top > first:
                blocks.append(stage)
        consecutive = range(min(blocks, default=0), max(blocks, default=0) + 1)
        if self.by_layer and blocks != list(consecutive):
            raise ValueError(f"{self.folder} lacks layers: only the files {blocks} contain transformer blocks")
        return blocks

    def _check_layers(self, given: int | None, whole: bool) -> None:
        """Raise ValueError if the number of layers contradicts the settings or --num-layers, or may be too small.

        whole: whether the files are complete, although they record no number of layers.
        """
        named = self.settings.get("num_layers", given)
        if named is None and not whole:
            raise ValueError(
                f"{self.folder} does not record the number of layers (there are files of "
                f"{self.layers} layers); give --num-layers"
            )
        for other in (named, given):
            if other not in (None, self.layers):
                raise ValueError(
                    f"{self.folder} contains {self.layers} layers, but its settings or --num-layers give {other}"
                )

    def _files(
        self, form: re.Pattern[str], place: Callable[[re.Match[str]], tuple[int, int]]
    ) -> dict[tuple[int, int], Path]:
        """Return the files whose path matches `form`, as (stage or layer, rank) -> path."""
        found: dict[tuple[int, int], Path] = {}
        for path in _candidates(self.folder):
            match = form.fullmatch(path.relative_to(self.folder).as_posix())
            if match and found.setdefault(place(match), path) != path:
                raise ValueError(f"{found[place(match)]} and {path.name} belong to the same rank; remove one of them")
        return found

    def _version_of(self, headers: Sequence[Given], given: int | None) -> tuple[float, str]:
        """Return (checkpoint version, words for where it comes from).

        The sources are the files, else --checkpoint-version, else tensor names that tell which program wrote the files.
        """
        found = None
        for header in headers:
            version = header.get("checkpoint_version")
            if version is None:
                continue
            found = version if found is None else found
            if found not in (0, 1, 2, 3) or version != found:
                raise ValueError(f"{self.folder}: checkpoint version {found} is unknown or differs between files")
        if found is not None:
            if given is not None and given != found:
                raise ValueError(f"{self.folder} has checkpoint version {found:g}, but --checkpoint-version is {given}")
            return float(found), "recorded in the files"
        if given is not None:
            return float(given), "from --checkpoint-version"
        if "position_embedding.weight" in self._theirs:
            return 2.0, "from this project's tensor names"
        cpm_names = {"word_embeddings.weight", "transformer.layers.0.input_layernorm.weight"}
        if not self.by_layer and cpm_names <= self._theirs:
            return 0.0, "from CPM-1's tensor names"
        own = bool(headers) and "model" in headers[0]  # Megatron-LM's key for weights; DeepSpeed's is "module"
        if own and any(name.startswith("language_model.transformer.") for name in self._theirs):
            return 0.0, "Megatron-LM's default for files that record no version"
        raise ValueError(
            f"{self.folder} does not record the order of query, key and value; give --checkpoint-version {ORDERS}"
        )

    def _add(self, content: Given, path: Path, rank: int, first_layer: int) -> int:
        """Store one file's tensors. Return the number of its last layer plus 1, or `first_layer` if it has no layer.

        first_layer: number in the whole model of the file's first layer.
        """
        whole = _of_layer(content) if self.by_layer else content.get("module", content.get("model"))
        if not isinstance(whole, Mapping):
            raise ValueError(f"{path} contains weights under neither 'module' nor 'model'")
        top = first_layer
        for name, tensor in _flat(whole):
            self._theirs.add(re.sub(r"^module\.", "", name))
            ours = our_name(name, first_layer)
            if ours is None or not isinstance(tensor, Tensor):
                continue
            if not ours:
                raise ValueError(f"{path}: the tensor {name} of shape {list(tensor.shape)} is unknown")
            if not tensor.is_floating_point():
                raise ValueError(f"{path}: {name} has dtype {tensor.dtype}; save it as floating point")
            layer = re.match(r"layers\.(\d+)\.", ours)
            top = max(top, int(layer[1]) + 1) if layer else top
            # The last pipeline stage has second copies of both embeddings: it computes the logits with its copy of the
            # word embedding, and does not use that of the position embedding. The first copies are imported.
            first = self._parts.setdefault(ours, {}).setdefault(rank, tensor)
            if ours == _EMBEDDING and first is not tensor and not _same(first, tensor):
                raise ValueError(
                    f"{path}: {name} differs from the embedding; untied output embeddings are not supported"
                )
        return top

    @property
    def layers(self) -> int:
        """Number of transformer blocks in the files."""
        return 1 + max((int(name.split(".")[1]) for name in self._parts if name.startswith("layers.")), default=-1)

    def names(self) -> list[str]:
        """Return our names of all tensors in the files."""
        return list(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape that tensor `name` has when the ranks' shards are joined."""
        shape = list(self._part(name)[0].shape)
        dim = _split_dim(name)
        if dim is not None and dim < len(shape):
            shape[dim] *= self.ranks
        return tuple(shape)

    def read(self, name: str, heads: int) -> Tensor:
        """Join the ranks' shards of tensor `name`; return it in fp32.

        heads: number of attention heads. Rows of query, key and value are reordered to our order (see `by_heads`).
        """
        parts = self._part(name)
        dim = _split_dim(name)
        if dim is None:
            return parts[0].float()
        shards = [part.float() for part in parts]
        if "query_key_value" in name:
            shards = [by_heads(shard, heads // self.ranks, self.version) for shard in shards]
        return torch.cat(shards, dim)

    def _part(self, name: str) -> list[Tensor]:
        if name not in self._parts:
            raise ValueError(f"{self.folder} contains no tensor for {name}")
        parts = self._parts[name]
        if len(parts) != self.ranks:
            raise ValueError(f"{self.folder}: {name} is in the files of only {len(parts)} of {self.ranks} ranks")
        return [parts[rank] for rank in range(self.ranks)]


def _as_cpm_pretrain(items: Sequence[int], blocks: Sequence[int]) -> bool:
    """Return whether the files are a complete CPM-Pretrain pipeline.

    Its pipeline layers are, numbered from 0: cast, embedding, transpose, the transformer blocks, two layers without
    weights, final norm, output head.
    """
    # Two blocks: the layers 1 (embedding), 3 and 4 (blocks), 6 (norm) and 7 (head) have weights.
    last = len(blocks) + 5
    return list(items) == [1, *range(3, last - 2), last - 1, last]


def _candidates(folder: Path) -> Iterator[Path]:
    for pattern in ("mp_rank_*.pt", "mp_rank_*/*.pt", "layer_*.pt"):
        yield from sorted(folder.glob(pattern))


def _of_layer(content: Given) -> dict[str, Any]:
    """Return the tensors of a layer file, named as in the whole model.

    The file contains a transformer block, the embedding or the final norm.
    """
    prefix = ""
    if set(content) == {"weight", "bias"}:
        prefix = "final_layernorm."
    elif any(name.startswith("input_layernorm.") for name in content):
        prefix = "layers.0."
    return {prefix + name: tensor for name, tensor in content.items()}


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal up to rounding, like two copies of a weight that were updated separately."""
    return a.shape == b.shape and bool((a.float() - b.float()).abs().max() <= 1e-3 * a.float().abs().max())


def _newest(folder: Path) -> Path:
    """Return the subfolder that Megatron's or DeepSpeed's tracker file names, else `folder` itself."""
    for tracker in (folder / "latest_checkpointed_iteration.txt", folder / "latest"):
        if not tracker.is_file():
            continue
        word = tracker.read_text(encoding="utf-8").strip()
        names = [word]
        if word.isdigit():
            names += [f"iter_{int(word):07d}", f"global_step{int(word)}"]
        for name in names:
            if (folder / name).is_dir():
                return folder / name
        raise ValueError(f"{tracker} names {word}, which does not exist")
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    return folder


def _flat(tree: Given, above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def our_name(name: str, first_layer: int = 0) -> str | None:
    """Return our name for the foreign parameter `name`; None for entries that are not parameters, "" if unknown.

    first_layer: number that is added to the layer number in `name`.
    """
    if _SKIP.search(name):
        return None
    name = re.sub(r"^(module|model|language_model)\.", "", name)
    name = re.sub(r"^language_model\.", "", name)
    name = re.sub(r"^(transformer|encoder)\.", "", name).replace(".self_attention.", ".attention.")
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
        "position_embeddings.weight": "position_embedding.weight",
        "position_embedding.weight": "position_embedding.weight",
        "embedding.position_embeddings.weight": "position_embedding.weight",
        "final_layernorm.weight": "final_norm.norm.weight",
        "final_layernorm.bias": "final_norm.norm.bias",
        "final_norm.norm.weight": "final_norm.norm.weight",
        "final_norm.norm.bias": "final_norm.norm.bias",
    }.get(name, "")


def _split_dim(name: str) -> int | None:
    """Return the dimension along which a tensor is split over ranks, or None for a replicated tensor."""
    if _ROW.search(name):
        return 1
    return 0 if _COLUMN.search(name) else None


def by_heads(part: Tensor, heads: int, version: float) -> Tensor:
    """Reorder a rank's query, key and value rows from the order of a checkpoint version to our order.

    Version 0: all queries, all keys, all values. Version 1: query, key and value for each feature of each head.
    Versions 2 and 3: query, key and value for each head, which is our order.
    """
    rest = part.shape[1:]
    if version < 1:
        by_kind = part.view(3, heads, -1, *rest)
        return by_kind.transpose(0, 1).reshape(part.shape)
    if version < 2:
        by_feature = part.view(heads, -1, 3, *rest)
        return by_feature.transpose(1, 2).reshape(part.shape)
    return part
