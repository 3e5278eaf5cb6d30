"""The same lists of layers, run by pipeline stages: the only file of the models that knows of `tds`."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn

from megatron import mpu
from megatron.config import Config
from tds.boundary import Boundary
from tds.pipe import LayerSpec, PipelineModule, TiedLayerSpec

from .gpt2 import gpt2_layers, vocab_size_of
from .init import init_weights
from .layers import Layer, run
from .loss import TokenLoss

# Hidden states are the same on all model-parallel ranks, so each carries its share of them.
TRAVELLERS = {
    "hidden": Boundary("hidden", grad=True, split=True),
    "position_ids": Boundary("position_ids", kind="int", grad=False),
    "document_ids": Boundary("document_ids", kind="int", grad=False),
}


class LayerStackPipe(PipelineModule):
    """This stage's stretch of a list of layers."""

    def __init__(self, layers: Sequence[Layer], config: Config, tied_weights: dict[str, str], loss_fn: Any) -> None:
        """tied_weights: for each tie, the path of the shared weight in its module."""
        super().__init__(
            layers=[self._spec(layer, tied_weights) for layer in layers],
            topology=mpu.get_topology(),
            loss_fn=loss_fn,
            partition_method=config.parallel.partition_method,
        )
        self._chunk = config.parallel.checkpoint_num_layers if config.parallel.checkpoint_activations else 0
        self._layers = list(layers)[self._local_start : self._local_stop]
        first_with = {layer.tied: layer.name for layer in reversed(layers) if layer.tied}
        self.boundaries = [TRAVELLERS[name] for name in self._layers[-1].puts_out if name in TRAVELLERS]
        self._names = [first_with[layer.tied] if layer.tied else layer.name for layer in self._layers]
        init_weights(self, config.train.seed)

    @staticmethod
    def _spec(layer: Layer, tied_weights: dict[str, str]) -> LayerSpec:
        if layer.tied is None:
            return LayerSpec(layer.cls, *layer.args)
        return TiedLayerSpec(
            layer.tied, layer.cls, *layer.args, forward_fn=layer.call, tied_weight_attr=tied_weights[layer.tied]
        )

    def named_layers(self) -> Iterator[tuple[str, nn.Module]]:
        """(global name, module) of every layer of this stage, tied ones once."""
        seen = set()
        for name, call in zip(self._names, self.forward_funcs, strict=True):
            module = call.args[0] if isinstance(call, partial) else call
            if name not in seen:
                seen.add(name)
                yield name, module

    def forward(self, inputs: Any) -> Any:
        """What comes from the stage before (or the batch) -> what goes to the next (or the logits)."""
        steps = list(zip(self._layers, self.forward_funcs, strict=True))
        return run(steps, inputs, self._chunk if self.training else 0)


class GPT2ModelPipe(LayerStackPipe):
    """GPT-2 over pipeline stages. Inputs: (tokens [b, s], position ids [b, s], document ids [b, s] or empty).

    Between stages travel the hidden states, each model-parallel rank carrying its share, and
    the document ids, which are empty in plain causal attention.
    """

    def __init__(self, config: Config) -> None:
        vocab_size = vocab_size_of(config)
        super().__init__(
            gpt2_layers(config, vocab_size),
            config,
            tied_weights={"embedding": "word_embeddings.weight"},
            loss_fn=TokenLoss(vocab_size),
        )
