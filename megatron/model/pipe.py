"""Pipeline versions of the models, built from the same lists of layers; no other module of megatron/model uses tds."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron import mpu
from megatron.config import Config
from tds.boundary import Boundary
from tds.pipe import LayerSpec, PipelineModule, TiedLayerSpec

from .cuts import partition_method
from .gpt2_layers import gpt2_layers, vocab_size_of
from .layers import Layer, LayerRunner, global_names, init_weights
from .loss import TokenLoss
from .masks import no_documents

INTEGERS = ("position_ids", "document_ids", "decoder_tokens", "encoder_document_ids", "decoder_document_ids")
# Hidden states are replicated on all model-parallel ranks, so each rank sends only its share of them. With
# sequence parallelism each rank holds a different shard and sends all of it.
BOUNDARIES = {
    "hidden": Boundary("hidden", grad=True, split=True),
    "encoded": Boundary("encoded", grad=True, split=True),
    "table": Boundary("table", grad=True),
    "router_loss": Boundary("router_loss", grad=True),
    **{name: Boundary(name, kind="int", grad=False) for name in INTEGERS},
}


class LayerStackPipe(LayerRunner, PipelineModule):
    """One pipeline stage of a list of layers: a range of layers, or one range per virtual-pipeline chunk.

    layer_names: see LayerStack.
    """

    def __init__(
        self, layers: Sequence[Layer], config: Config, tied_weights: dict[str, str], loss_fn: Any, example: Any
    ) -> None:
        """Build this stage's layers. tied_weights: key of a tie -> its weight's name. example: inputs of layer 0."""
        specs = [_layer_spec(layer, tied_weights, config.train.seed) for layer in layers]
        super().__init__(
            layers=specs,
            topology=mpu.get_topology(),
            loss_fn=loss_fn,
            partition_method=partition_method(layers, config),
            chunks=config.parallel.virtual_pipeline_size,
            example=example,
        )
        self._recompute_group_size = config.recomputed_layers
        self._rng = mpu.get_rng()
        self._layers = [layers[index] for index in self.indices]
        self.layer_names = global_names(layers)
        self._stage_names = [self.layer_names[index] for index in self.indices]
        self.boundaries: Any = [_boundaries_before(layers, stop) for _, stop in self.bounds]  # outputs of each chunk
        self.receives: Any = [_boundaries_before(layers, start) for start, _ in self.bounds]  # inputs of each chunk
        if self.chunks == 1:  # tds then reads the declaration of the only chunk, not a list of declarations
            self.boundaries = self.boundaries[0]
            self.receives = self.receives[0]
        init_weights(self, config.train.seed)

    def named_layers(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield (global name, module) of every layer of this stage, tied layers once."""
        by_name: dict[str, nn.Module] = {}  # all layers of a tie have one name
        for name, function in zip(self._stage_names, self.forward_funcs, strict=True):
            # A layer with its own `call` is run by partial(call, module), any other layer by its module.
            by_name[name] = function.args[0] if isinstance(function, partial) else function
        yield from by_name.items()

    def forward(self, inputs: Any, chunk: int = 0) -> Any:
        """Run one chunk on the batch or the previous stage's output; return the next stage's input or the logits."""
        layers_of_chunk = slice(*self.chunk_slices[chunk])
        steps = list(zip(self._layers[layers_of_chunk], self.forward_funcs[layers_of_chunk], strict=True))
        return self.run_steps(steps, inputs)


def _layer_spec(layer: Layer, tied_weights: dict[str, str], seed: int) -> LayerSpec:
    """Return DeepSpeed's spec of a layer; its `build` seeds the initial values by `seed` and the layer's name."""
    if not (layer.tied or layer.call):
        spec = LayerSpec(layer.cls, *layer.args)
    else:
        # DeepSpeed accepts a `forward_fn` only for tied layers, so a layer that is not tied gets a tie of its own.
        key = layer.tied or layer.name.replace(".", "_")  # torch's names of modules contain no dots
        weight: Any = tied_weights[layer.tied] if layer.tied else []  # []: shares no weight
        spec = TiedLayerSpec(key, layer.cls, *layer.args, forward_fn=layer.call, tied_weight_attr=weight)
    spec.build = lambda log=False: layer.build(seed)  # `log` is DeepSpeed's argument
    return spec


def _boundaries_before(layers: Sequence[Layer], index: int) -> list[Boundary] | None:
    """Return the tensors that cross a stage boundary before layer number `index`; None before the first layer."""
    if index == 0:
        return None
    boundaries = [BOUNDARIES[name] for name in layers[index - 1].outputs if name in BOUNDARIES]
    if mpu.sequence_axis().size > 1:  # each rank holds a different shard, so it sends all of it
        boundaries = [replace(boundary, split=False) for boundary in boundaries]
    return boundaries


# Key of tied layers -> name of the shared weight in their module.
TIED_WEIGHTS = {"embedding": "word_embeddings.weight"}


class GPT2ModelPipe(LayerStackPipe):
    """GPT-2 over pipeline stages. Inputs: (tokens [b, s], position ids [b, s], document ids [b, s] or empty)."""

    def __init__(self, config: Config) -> None:
        vocab_size = vocab_size_of(config)
        b = config.train.batch_size
        s = config.data.seq_length
        tokens = torch.zeros(b, s // mpu.context_axis().size).long()  # this context rank's tokens
        positions = torch.zeros(b, s).long()  # of the whole sequence
        example = tokens, positions, no_documents(tokens.device)  # --partition-method measured runs layers on it
        loss = TokenLoss.from_config(config, vocab_size)
        super().__init__(gpt2_layers(config, vocab_size), config, TIED_WEIGHTS, loss, example)
