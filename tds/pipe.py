"""DeepSpeed's PipelineModule, LayerSpec and TiedLayerSpec, with more partition methods and several chunks per stage."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from ._deepspeed import LayerSpec, StockPipelineModule, TiedLayerSpec, quietly
from .groups import share_deepspeed_groups
from .layer_times import choose_cuts
from .sequential import SequentialModule, run_chunk, seeded_layers
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
        self._example = example  # for `_partition_layers`, which the constructor below calls
        if chunks > 1 and kwargs.get("seed_layers"):
            raise ValueError("seed_layers supports only one chunk per stage: leave out seed_layers, or use chunks=1")
        with quietly(), share_deepspeed_groups(lambda: self._topo):  # the constructor below sets `_topo`
            super().__init__(layers, *args, **kwargs)
        del self._example  # only the partition needed it; it may be large
        if self.activation_checkpoint_interval < 0:
            raise ValueError("activation_checkpoint_interval must be a number of layers, or 0 to recompute nothing")

    def forward(self, inputs: Any, chunk: int = 0) -> Any:
        """Run the layers of one chunk of this stage."""
        if self.chunks == 1 and not self.activation_checkpoint_interval:
            return super().forward(inputs)
        # When DeepSpeed's method recomputes layers, it passes them the only tensor of a tuple in place of the tuple,
        # and gives each group of layers the same seeds.
        return run_chunk(self, inputs, chunk)

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
        """Choose the layers of this stage, for DeepSpeed's constructor, which then calls `_build`."""
        if self.num_stages == 1:
            self.chunks = 1  # a single stage has nothing to interleave
        self.cuts = choose_cuts(self, method)
        self.bounds = list(pairwise(self.cuts))[self.stage_id :: self.num_stages]  # e.g. groups 1, 5, 9 on stage 1 of 4
        self.indices: list[int] = []
        self.chunk_slices: list[tuple[int, int]] = []  # range of each chunk in this stage's list of layers
        # For example, the bounds (2, 4) and (8, 11) give the indices 2 3 8 9 10 and the slices (0, 2) and (2, 5).
        for start, stop in self.bounds:
            begin = len(self.indices)
            self.indices += range(start, stop)
            self.chunk_slices.append((begin, len(self.indices)))
        self.parts = self.cuts  # the name by which DeepSpeed reads the cuts
        self._set_bounds(*self.bounds[0])  # DeepSpeed knows one range of layers; `_build` builds the other chunks

    def _build(self) -> None:
        """Build the layers of this stage; if a layer fails on any rank, raise an error on every rank."""
        try:
            for bounds in self.bounds:
                self._set_bounds(*bounds)
                super()._build()
        except Exception as error:
            raise_if_any_failed(error)  # reports the error to the other ranks
            raise
        raise_if_any_failed(None)  # raises if another rank failed
        self._set_bounds(*self.bounds[0])  # which DeepSpeed reads later

    def _index_tied_modules(self) -> Any:
        """Return DeepSpeed's ties, extended to all weights of each tied module, not only to `tied_weight_attr`."""
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
        weights = {name: model._recursive_getattr(module, name) for name in comm["weight_attr"]}
        yield key, comm["group"], weights


__all__ = ["LayerSpec", "PipelineModule", "SequentialModule", "StockPipelineModule", "TiedLayerSpec", "seeded_layers"]
