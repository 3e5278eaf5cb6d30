"""GPT checkpoints with a pickled file per model-parallel rank: CPM-1's, Megatron-LM's of its time, and plain DeepSpeed's.

    80000/mp_rank_00_model_states.pt            CPM-1 (2-way for CPM-1-large), DeepSpeed: weights under "module"
    iter_0001000/mp_rank_00/model_optim_rng.pt  Megatron-LM: under "model"; mp_rank_00_001 is the second pipeline stage

The files are unpickled for tensors and plain values alone (torch's `weights_only`); whatever
else a file asks for is refused, and nothing in it is run.
"""

import argparse
import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .options import describe

_FILES = (re.compile(r"mp_rank_(\d\d)_model_states\.pt"), re.compile(r"mp_rank_(\d\d)(?:_(\d\d\d))?/model\w*\.pt"))
_COLUMN = re.compile(r"word_embeddings\.weight|query_key_value\.\w+|dense_h_to_4h\.\w+")  # cut along rows
_ROW = re.compile(r"(attention\.dense|dense_4h_to_h)\.weight")  # cut along columns
_SKIP = re.compile(r"\.attention\.(bias|masked_bias)$|word_embeddings_for_head|^lm_head\.|rotary|\.inv_freq$")


class RankFiles:
    """Tensors by our names, joined over the ranks when asked for.

    Raises ValueError for folders, files and names that are not known.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = _newest(folder)
        found = {}
        for path in sorted(self.folder.glob("mp_rank_*")):
            for candidate in sorted(path.glob("*.pt")) if path.is_dir() else [path]:
                for form in _FILES:
                    match = form.fullmatch(str(candidate.relative_to(self.folder)))
                    if match:
                        stage = int(match.groups()[1] or 0) if form.groups > 1 else 0
                        found[stage, int(match[1])] = candidate
        if not found:
            raise ValueError(
                f"{self.folder} holds neither mp_rank_00_model_states.pt nor mp_rank_00/model_optim_rng.pt"
            )
        self.stages, self.ranks = max(s for s, _ in found) + 1, max(r for _, r in found) + 1
        for stage in range(self.stages):
            for rank in range(self.ranks):
                if (stage, rank) not in found:
                    raise ValueError(f"{self.folder} lacks the file of model-parallel rank {rank}, stage {stage}")
        contents = {place: load_plain(path) for place, path in found.items()}
        first = contents[0, 0]
        self.version = float(first.get("checkpoint_version") or 0)
        known = first.get("args")
        self.settings: dict[str, Any] = vars(known) if isinstance(known, argparse.Namespace) else {}
        self._parts: dict[str, list[Tensor]] = {}
        for rank in range(self.ranks):
            behind = 0
            for stage in range(self.stages):
                behind = self._take(contents[stage, rank], found[stage, rank], behind)

    def _take(self, content: Mapping[str, Any], path: Path, behind: int) -> int:
        """Remember the tensors of one file, whose layers count from `behind`; returns where the next stage's do."""
        whole = content.get("module", content.get("model"))
        if not isinstance(whole, Mapping):
            raise ValueError(f"{path} has its weights neither under 'module' nor under 'model'")
        top = behind
        for name, tensor in _flat(whole):
            ours = our_name(name, behind)
            if ours is None or not isinstance(tensor, Tensor):
                continue
            if not ours:
                raise ValueError(f"{path}: no place is known for the tensor {name} of shape {list(tensor.shape)}")
            layer = re.match(r"layers\.(\d+)\.", ours)
            top = max(top, int(layer[1]) + 1) if layer else top
            self._parts.setdefault(ours, []).append(tensor)
        return top

    @property
    def layers(self) -> int:
        return 1 + max(int(name.split(".")[1]) for name in self._parts if name.startswith("layers."))

    def names(self) -> list[str]:
        return list(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        shape = list(self._part(name)[0].shape)
        dim = _cut(name)
        if dim is not None:
            shape[dim] *= self.ranks
        return tuple(shape)

    def read(self, name: str, heads: int) -> Tensor:
        """The whole tensor as ours is laid out, fp32; rows of query, key and value go head by head."""
        parts = self._part(name)
        dim = _cut(name)
        if dim is None:
            return parts[0].float()
        if "query_key_value" in name:
            parts = [by_heads(part, heads // self.ranks, self.version) for part in parts]
        return torch.cat([part.float() for part in parts], dim)

    def _part(self, name: str) -> list[Tensor]:
        if name not in self._parts:
            raise ValueError(f"{self.folder} holds no tensor for {name}")
        parts = self._parts[name]
        if len(parts) % self.ranks:
            raise ValueError(f"{self.folder}: {name} is in {len(parts)} files of {self.ranks} ranks")
        return parts[: self.ranks]


def _newest(folder: Path) -> Path:
    """The folder with the files: by Megatron's tracker, by DeepSpeed's, or the one given."""
    for tracker in (folder / "latest_checkpointed_iteration.txt", folder / "latest"):
        if tracker.is_file():
            word = tracker.read_text(encoding="utf-8").strip()
            for name in (word, f"iter_{int(word):07d}" if word.isdigit() else word):
                if (folder / name).is_dir():
                    return folder / name
            raise ValueError(f"{tracker} names {word}, which is not there")
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    return folder


def load_plain(path: Path) -> Mapping[str, Any]:
    """Unpickle tensors and plain values. Raises ValueError, and runs nothing, where a file asks for more."""
    with torch.serialization.safe_globals([argparse.Namespace]):  # Megatron-LM keeps its settings so: names and values
        try:
            try:
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except (RuntimeError, ValueError):  # the format before torch 1.6 cannot be mapped
                content = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            wanted = re.search(r"GLOBAL ([\w.]+)", str(error))
            what = f"asks for {wanted[1]}" if wanted else "is damaged, or holds more than tensors and plain values"
            raise ValueError(
                f"{path} {what}, which is not run; save it again with its weights alone, where you trust it"
            ) from None
        except (OSError, EOFError, RuntimeError) as error:
            raise ValueError(f"{path} cannot be read: {describe(error)}") from None
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a dictionary")
    return content


def _flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def our_name(name: str, behind: int = 0) -> str | None:
    """What we call a parameter of theirs; None for what is no parameter, "" for what is not known."""
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
        return f"layers.{int(layer[1]) + behind}.{layer[2]}"
    return {
        "word_embeddings.weight": "embedding.word_embeddings.weight",
        "embedding.word_embeddings.weight": "embedding.word_embeddings.weight",
        "position_embeddings.weight": "position_embedding.weight",
        "position_embedding.weight": "position_embedding.weight",
        "embedding.position_embeddings.weight": "position_embedding.weight",
        "final_layernorm.weight": "final_norm.norm.weight",
        "final_layernorm.bias": "final_norm.norm.bias",
        "final_norm.norm.weight": "final_norm.norm.weight",
        "final_norm.norm.bias": "final_norm.norm.bias",
    }.get(name, "")


def _cut(name: str) -> int | None:
    """The dimension along which a tensor is cut over the ranks, None for copies."""
    if _ROW.search(name):
        return 1
    return 0 if _COLUMN.search(name) else None


def by_heads(part: Tensor, heads: int, version: float) -> Tensor:
    """A rank's rows of query, key and value, head by head, from the order of Megatron-LM's checkpoint version.

    0: all queries, all keys, all values. 1: heads, then features, then query, key and value.
    2 and later: heads, then query, key and value, as ours.
    """
    rest = part.shape[1:]
    if version < 1:
        return part.view(3, heads, -1, *rest).transpose(0, 1).reshape(part.shape)
    if version < 2:
        return part.view(heads, -1, 3, *rest).transpose(1, 2).reshape(part.shape)
    return part
