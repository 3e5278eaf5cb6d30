"""PipelineModule, LayerSpec and TiedLayerSpec: DeepSpeed's, with explicit cuts and without the chatter."""

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec

from ._deepspeed import StockPipelineModule, quietly


class PipelineModule(StockPipelineModule):  # type: ignore[misc]
    """A model as a list of layers, of which this process builds the ones of its stage.

    partition_method: `uniform`, `parameters`, `type:REGEX` as in DeepSpeed, or the cuts
    themselves, `[0, 3, 7]` or `"0,3,7"`: stage i gets the layers cuts[i] to cuts[i+1]-1.
    Raises ValueError for cuts that leave a layer out or do not fit the number of stages.
    """

    def __init__(self, layers: Any, *args: Any, **kwargs: Any) -> None:
        with quietly():
            super().__init__(layers, *args, **kwargs)

    def _synchronize_tied_weights(self) -> None:
        with torch.no_grad():
            super()._synchronize_tied_weights()

    def _partition_layers(self, method: str | Sequence[int] = "uniform") -> None:
        text = method if isinstance(method, str) else ",".join(map(str, method))
        if not text.replace(",", "").replace(" ", "").isdigit():
            super()._partition_layers(method=method)
            return
        cuts = [int(part) for part in text.split(",")]
        count = len(self._layer_specs)
        if len(cuts) != self.num_stages + 1 or cuts[0] != 0 or cuts[-1] != count or sorted(cuts) != cuts:
            raise ValueError(
                f"the cuts {cuts} do not divide {count} layers among {self.num_stages} stages: give "
                f"{self.num_stages + 1} rising numbers, the first 0 and the last {count}"
            )
        self.parts = cuts
        self._set_bounds(start=cuts[self.stage_id], stop=cuts[self.stage_id + 1])


__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
