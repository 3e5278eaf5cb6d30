"""Records of a run: the ranks' shards are joined to full tensors, which can be compared across layouts."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

RankRecord = dict[str, Any]  # content of the file that a rank wrote
Tensors = dict[str, list[Tensor]]  # name -> tensors of several ranks


class OutputKey(NamedTuple):
    """Identifies one tensor in the output of a module.

    micro: index of the micro-batch in the iteration, over all replicas. name: global name of the module.
    """

    micro: int
    name: str
    call_index: int  # index of this call of the module within the micro-batch
    tensor_index: int  # index of the tensor among those that the call returned


@dataclass
class Records:
    """The records of one run.

    ranks: the content of each rank's file. micros: number of micro-batches in an iteration, over all replicas.
    """

    ranks: list[RankRecord]
    micros: int

    @classmethod
    def read(cls, folder: Path, micros: int) -> "Records":
        """Return the records that the ranks wrote into `folder`. Raises OSError."""
        paths = sorted(folder.glob("rank*.pt"))
        return cls([torch.load(path, weights_only=True) for path in paths], micros)

    @property
    def losses(self) -> list[float]:
        """Loss of each step, from rank 0's record; the engine returns the same loss on every rank."""
        return list(self.ranks[0]["losses"])

    @cached_property
    def layers(self) -> list[str]:
        """Global names of the layers of all stages."""
        return list(dict.fromkeys(name for rank in self.ranks for name in rank["layers"]))

    @cached_property
    def kinds(self) -> dict[str, str]:
        """Module name -> class name."""
        return {name: kind for rank in self.ranks for name, kind in rank["kinds"].items()}

    def layer_of(self, name: str) -> str:
        """Return the name of the layer that contains module or parameter `name`, or `name` if no layer does."""
        containing = [layer for layer in self.layers if (name + ".").startswith(layer + ".")]
        return max(containing, key=len, default=name)

    def initial_values(self) -> Tensors:
        """Return parameter name -> its initial values.

        The list holds one joined tensor [full] per replica and stage for a parameter that is split over ranks, and one
        tensor per rank for any other parameter. Stages that hold a tied parameter but do not use it are left out.
        """
        # Only a stage that uses a parameter computes a gradient for it.
        used_names = set[str]()
        for rank in self.ranks:
            used_names.update(rank["gradients"])
        parts_by_copy: dict[tuple[str, int, int], list[tuple[Any, Tensor]]] = defaultdict(list)
        for rank in self.ranks:
            for name, value in rank["weights"].items():
                is_frozen = name not in used_names
                if is_frozen or name in rank["gradients"]:
                    part = (rank["specs"][name], value)
                    parts_by_copy[name, rank["pipe"], rank["data"]].append(part)
        joined: Tensors = defaultdict(list)
        for (name, _, _), parts in parts_by_copy.items():
            joined[name] += _join_shards(parts)
        return dict(joined)

    def gradients(self) -> Tensors:
        """Return parameter name -> its gradient in fp64, summed over the replicas and stages that have the parameter.

        The list holds one joined tensor [full] for a parameter that is split over ranks, and one copy per
        model-parallel rank for any other parameter.
        """
        # Parameter name -> model-parallel rank -> (sharding, sum so far).
        sums: dict[str, dict[int, Any]] = defaultdict(dict)
        for rank in sorted(self.ranks, key=itemgetter("model")):
            for name, value in rank["gradients"].items():
                sums_by_rank = sums[name]
                model_rank = rank["model"]
                # `scale` is the factor on the losses that makes up for averaging over replicas.
                total = value / rank["scale"]
                # Another replica, or another stage that uses this tied parameter, has added its gradient before.
                if model_rank in sums_by_rank:
                    _, earlier = sums_by_rank[model_rank]
                    total = earlier + total
                sums_by_rank[model_rank] = (rank["specs"][name], total)
        return {name: _join_shards(list(parts.values())) for name, parts in sums.items()}

    def unequal_weights(self) -> set[str]:
        """Return the names of parameters whose copies, on the ranks that use them, differ by a bit after the last step.

        Gradients are recorded before any reduction, so only the trained weights show a missing reduction.
        """
        first_copies: dict[tuple[str, Any], int] = {}
        unequal = set[str]()
        for rank in self.ranks:
            for name in rank["gradients"]:
                spec = rank["specs"][name]
                # Ranks hold copies of a replicated parameter; of a split one, only ranks with the same shard do.
                shard_index = None if spec["dim"] is None else rank["model"]
                # `trained` has a fingerprint of the bits of each weight after the last step.
                copy = rank["trained"][name]
                if first_copies.setdefault((name, shard_index), copy) != copy:
                    unequal.add(name)
        return unequal

    def buffers(self) -> Tensors:
        """Return buffer name -> the ranks' copies of this persistent buffer after the last step.

        Buffers of a PipelineModule itself or of its loss are on every stage, but only some stages may use them. The
        result therefore has only the copies of ranks that changed the buffer, or all copies if no rank changed it.
        """
        # Names of the buffers that at least one rank changed.
        changed = set[str]()
        for rank in self.ranks:
            changed.update(rank["changed"])
        copies: Tensors = defaultdict(list)
        for rank in self.ranks:
            for name, value in rank["buffers"].items():
                if name in rank["changed"] or name not in changed:
                    copies[name].append(value)
        return dict(copies)

    @cached_property
    def outputs(self) -> dict[OutputKey, list[Tensor]]:
        """Output tensor -> its parts on the model-parallel ranks. Outputs have the order in which modules returned."""
        pipelines: dict[tuple[int, int], list[RankRecord]] = defaultdict(list)
        for rank in sorted(self.ranks, key=itemgetter("pipe")):
            # Each pair of a replica and a tensor-parallel rank is one pipeline of stages.
            replica, _ = rank["share"]
            pipelines[replica, rank["model"]].append(rank)
        parts_by_key: dict[OutputKey, dict[int, Tensor]] = defaultdict(dict)
        for (_, model), stages in sorted(pipelines.items()):
            for key, value in self._outputs_of(stages):
                parts_by_key[key][model] = value
        return {key: list(parts.values()) for key, parts in parts_by_key.items()}

    def _outputs_of(self, stages: Sequence[RankRecord]) -> Iterator[tuple[OutputKey, Tensor]]:
        """Yield each output that one pipeline recorded, with its OutputKey. stages: records of the pipeline's ranks.

        The calls of a tied module are numbered stage by stage, from the first stage to the last stage.
        """
        data_rank, data_size = stages[0]["share"]
        first_micro = data_rank * (self.micros // data_size)  # number of the pipeline's first micro-batch
        outputs = []
        for rank in stages:
            for output in rank["outputs"]:
                outputs.append((output["chunk"], rank["pipe"], output))
        calls_by_rank: dict[tuple[int, str], dict[tuple[int, int], int]] = defaultdict(dict)
        # Sort by (chunk, stage), the order of the layers. Outputs of one chunk of a stage keep their order.
        for chunk, pipe, output in sorted(outputs, key=itemgetter(0, 1)):
            micro = first_micro + output["micro"]
            call = output["call"]
            calls = calls_by_rank[micro, output["name"]]
            # `calls` has the number of calls in each (chunk, stage) up to this one. Calls in earlier ones come
            # before the calls here: after two calls on stage 0, the first call on stage 1 has the index 2.
            calls[chunk, pipe] = max(calls.get((chunk, pipe), 0), call + 1)
            earlier_calls = sum(calls.values()) - calls[chunk, pipe]
            key = OutputKey(micro, output["name"], earlier_calls + call, output["number"])
            yield key, output["value"]


def _join_shards(parts: Sequence[tuple[Any, Tensor]]) -> list[Tensor]:
    """Return [the joined tensor] of a split parameter, or the ranks' copies of a replicated one.

    parts: (sharding, value) on each model-parallel rank. dim of the sharding is None if the parameter is replicated.
    """
    first_spec, value = parts[0]
    if first_spec["dim"] is None:
        return [value.reshape(spec["local"]) for spec, value in parts]
    whole = torch.zeros(first_spec["full"], dtype=value.dtype)
    for spec, value in parts:
        # This rank holds rows `begin` to `end` - 1 of the whole. Padding rows may follow them, and are left out.
        dim, begin, end = spec["rows"]
        length = end - begin
        rows = value.reshape(spec["local"]).narrow(dim, 0, length)
        whole.narrow(dim, begin, length).copy_(rows)
    return [whole]


def join_outputs(parts: Sequence[Tensor], expected: Tensor) -> list[Tensor] | None:
    """Join `parts`, one output on the model-parallel ranks, to tensors with the shape of `expected`, the whole output.

    Shards are concatenated to one tensor, and padding at its end is cut off: parts [4, 3] and [4, 3] of [4, 5] differ
    from it in dimension 1, are joined to [4, 6] and lose the last column. If the ranks hold copies, all copies are
    returned. Returns None if the parts are neither copies nor shards.
    """
    differing_dims = set[int]()
    for part in parts:
        if part.dim() != expected.dim():
            return None
        for dim in range(expected.dim()):
            if part.shape[dim] != expected.shape[dim]:
                differing_dims.add(dim)
    if not differing_dims:
        return list(parts)
    if len(differing_dims) > 1:
        return None
    dim = differing_dims.pop()
    whole = torch.cat(list(parts), dim)
    if whole.shape[dim] < expected.shape[dim]:
        return None
    return [whole.narrow(dim, 0, expected.shape[dim])]


def is_exact_split(parts: Sequence[Tensor], expected: Tensor) -> bool:
    """Return whether `join_outputs` joins these parts without cutting off padding."""
    are_copies = all(part.shape == expected.shape for part in parts)
    return are_copies or sum(part.numel() for part in parts) == expected.numel()
