"""DeepSpeed's PipelineModule, LayerSpec and TiedLayerSpec, with more partition methods and several chunks per stage."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from ._deepspeed import (
    StockPipelineModule,
    partition_balanced,
    partition_uniform,
    quietly,
    this_device,
)
from .groups import share_deepspeed_groups
from .layer_times import cut_by_time, layer_times
from .nested import as_tuple
from .sequential import SequentialModule, run_layers, seeded_layers
from .start import raise_if_any_failed
from .ties import tie_all_weights


class PipelineModule(StockPipelineModule):  # type: ignore[misc]
    """A model as a list of layers; this process builds the layers of its stage.

    partition_method: one of `uniform`, `parameters` and `type:REGEX`, as in DeepSpeed; `balanced`, which measures the
        layers and gives all stages similar times; or explicit cuts, `[0, 3, 7]` or `"0,3,7"`, where stage i gets the
        layers cuts[i] to cuts[i+1]-1.
    example: input of the first layer, for `balanced`.
    chunks: number of groups of layers per stage, for the schedule `interleaved`. Cuts then define stages x chunks
        groups. Stage i has group i, group stages + i, and so on.

    Raises ValueError for cuts that leave a layer out or do not fit the number of stages.
    """

    num_stages: int

    def __init__(self, layers: Any, *args: Any, chunks: int = 1, example: Any = None, **kwargs: Any) -> None:
        self.chunks = chunks
        self._example = example
        if chunks > 1 and kwargs.get("seed_layers"):
            raise ValueError("seed_layers supports only one chunk per stage: leave out seed_layers, or use chunks=1")
        with quietly(), share_deepspeed_groups(lambda: self._topo):  # the constructor below sets `_topo`
            super().__init__(layers, *args, **kwargs)
        del self._example  # only the partition needed it; it may be large

    def forward(self, inputs: Any, chunk: int = 0) -> Any:
        """Run the layers of one chunk of this stage."""
        if self.chunks == 1:
            return super().forward(inputs)
        first, end = self.chunk_slices[chunk]
        funcs = self.forward_funcs[first:end]
        interval = self.activation_checkpoint_interval
        length = interval or len(funcs) or 1  # an empty chunk would give range() a step of 0
        for start in range(0, len(funcs), length):
            part = funcs[start : start + length]
            if interval and torch.is_grad_enabled() and self._is_checkpointable(part):
                inputs = self.activation_checkpoint_func(lambda *x, part=part: run_layers(part, x), *as_tuple(inputs))
            else:
                inputs = run_layers(part, inputs)
        return inputs

    def stage_owner(self, layer_idx: int) -> int:
        """Return the stage of this layer."""
        for virtual_stage, (start, stop) in enumerate(pairwise(self.cuts)):
            if start <= layer_idx < stop:
                return virtual_stage % self.num_stages  # type: ignore[no-any-return]
        raise ValueError(f"there is no layer {layer_idx}: the model has {self.cuts[-1]} layers, counted from 0")

    def ckpt_layer_path(self, ckpt_dir: str, local_layer_idx: int) -> Any:
        """Return the path of a layer's checkpoint file, which is named by the layer's index in the whole model."""
        # DeepSpeed's method adds `_local_start` to the index.
        return super().ckpt_layer_path(ckpt_dir, self.indices[local_layer_idx] - self._local_start)

    def ckpt_layer_path_list(self, ckpt_dir: str, local_layer_idx: int) -> Any:
        """Return the paths of a layer's checkpoint files, which are named by the layer's index in the whole model."""
        return super().ckpt_layer_path_list(ckpt_dir, self.indices[local_layer_idx] - self._local_start)

    def _partition_layers(self, method: str | Sequence[int] = "uniform") -> None:
        if self.num_stages == 1:
            self.chunks = 1  # a single stage has nothing to interleave
        self.cuts = self._choose_cuts(method)
        bounds_of_groups = list(pairwise(self.cuts))
        self.bounds = bounds_of_groups[self.stage_id :: self.num_stages]  # e.g. groups 1, 5 and 9 on stage 1 of 4
        self.indices: list[int] = []
        self.chunk_slices: list[tuple[int, int]] = []  # range of each chunk in this stage's list of layers
        for start, stop in self.bounds:
            begin = len(self.indices)
            self.indices += range(start, stop)
            self.chunk_slices.append((begin, len(self.indices)))
        self.parts = self.cuts  # the name by which DeepSpeed reads the cuts
        self._set_bounds(*self.bounds[0])  # DeepSpeed knows one range of layers; `_build` builds the other chunks

    def _choose_cuts(self, method: str | Sequence[int]) -> list[int]:
        """Return the index of each group's first layer, followed by the number of layers."""
        count = len(self._layer_specs)
        groups = self.num_stages * self.chunks
        if count < groups:
            raise ValueError(f"{count} layers cannot be cut into {groups} groups: use fewer stages or chunks")
        if method == "balanced":
            if self._example is None:
                raise ValueError("partition_method 'balanced' measures the layers: give `example`, an input of layer 0")
            return cut_by_time(layer_times(self._layer_specs, self._example, this_device()), groups)
        text = method if isinstance(method, str) else ",".join(map(str, method))
        if not text.replace(",", "").replace(" ", "").isdigit():  # a name, not cuts such as "0,3,7"
            return self._named_cuts(text, groups)
        cuts = [int(part) for part in text.split(",")]
        if len(cuts) != groups + 1 or cuts[0] != 0 or cuts[-1] != count or sorted(cuts) != cuts:
            raise ValueError(
                f"the cuts {cuts} do not divide {count} layers into {groups} groups: give "
                f"{groups + 1} rising numbers from 0 to {count}"
            )
        return cuts

    def _named_cuts(self, method: str, groups: int) -> list[int]:
        """Return the cuts of one of DeepSpeed's partition methods."""
        count = len(self._layer_specs)
        if method.lower() == "uniform":
            return list(map(int, partition_uniform(count, groups)))
        if method.lower() == "parameters":
            # Numbers of numpy would be no valid seeds of `seed_layers`.
            return list(map(int, partition_balanced(self._count_layer_params(), groups)))
        if method.lower().startswith("type:"):
            matching = set(self._find_layer_type(method.split(":", 1)[1]))
            weights = [int(i in matching) for i in range(count)]  # 1 for a matching layer, 0 for any other
            return list(map(int, partition_balanced(weights, groups)))
        raise ValueError(
            f"there is no partition_method {method!r}; use uniform, parameters, type:REGEX, balanced or a list of cuts"
        )

    def _build(self) -> None:
        """Build the layers of this stage; if a layer fails on any rank, raise an error on every rank."""
        try:
            for bounds in self.bounds:
                self._set_bounds(*bounds)
                super()._build()
        except Exception as error:
            raise_if_any_failed(error)
            raise
        raise_if_any_failed(None)
        self._set_bounds(*self.bounds[0])

    def _index_tied_modules(self) -> Any:
        comms = super()._index_tied_modules()
        tie_all_weights(self, comms)
        return comms


def is_pipeline(model: nn.Module) -> bool:
    """Return whether `model` is a PipelineModule of tds or of DeepSpeed."""
    return isinstance(model, StockPipelineModule)


def tied_weights(model: Any) -> list[nn.Parameter]:
    """Return this stage's weights that other stages also hold; empty if `model` is not a PipelineModule."""
    tied: list[nn.Parameter] = []
    for _, _, weights in ties(model):
        tied += weights.values()
    return tied


def ties(model: Any) -> Iterator[tuple[str, Any, dict[str, nn.Parameter]]]:
    """Yield for each tied module of this stage its key, the group of its stages, and its weights by name."""
    for key, comm in getattr(model, "tied_comms", {}).items():
        module = model.tied_modules[key]
        yield key, comm["group"], {name: model._recursive_getattr(module, name) for name in comm["weight_attr"]}


def chunk_of_weights(module: Any) -> dict[Any, int]:
    """Return the chunk of a pipeline stage that uses each parameter.

    If several chunks use a parameter, this is the first of them, whose backward pass comes last.
    """
    chunk_of: dict[Any, int] = {}
    for chunk, (begin, end) in reversed(list(enumerate(getattr(module, "chunk_slices", ())))):  # the first remains
        for layer in module.forward_funcs[begin:end]:
            for parameter in getattr(layer, "parameters", list)():  # a plain function has none
                chunk_of[parameter] = chunk
    return chunk_of


__all__ = ["LayerSpec", "PipelineModule", "SequentialModule", "StockPipelineModule", "TiedLayerSpec", "seeded_layers"]
