"""The same lists of layers, run by pipeline stages: the only file of the models that knows of `tds`."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.config import Config
from tds.boundary import Boundary
from tds.layer_times import cut_by_time
from tds.pipe import LayerSpec, PipelineModule, TiedLayerSpec

from .gpt2 import gpt2_layers, vocab_size_of
from .layers import Layer, LooksAside, init_weights, run
from .loss import IsText, TokenLoss
from .masks import no_documents
from .t5 import t5_layers

FORWARD_AND_BACKWARD, RECOMPUTED = 3, 4  # times the work of a forward pass

# Hidden states are the same on all model-parallel ranks, so each carries its share of them. With sequence
# parallelism each rank has only its own stretch, and carries all of it.
BOUNDARIES = {
    "hidden": Boundary("hidden", grad=True, split=True),
    "position_ids": Boundary("position_ids", kind="int", grad=False),
    "document_ids": Boundary("document_ids", kind="int", grad=False),
    "encoded": Boundary("encoded", grad=True, split=True),
    "decoder_tokens": Boundary("decoder_tokens", kind="int", grad=False),
    "encoder_document_ids": Boundary("encoder_document_ids", kind="int", grad=False),
    "decoder_document_ids": Boundary("decoder_document_ids", kind="int", grad=False),
    "table": Boundary("table", grad=True),
}


class LayerStackPipe(LooksAside, PipelineModule):
    """This stage's stretch of a list of layers, or its stretches, one a chunk."""

    def __init__(
        self, layers: Sequence[Layer], config: Config, tied_weights: dict[str, str], loss_fn: Any, example: Any
    ) -> None:
        """tied_weights: for each tie, the path of the shared weight in its module. example: inputs of the first layer."""
        p = config.parallel
        method: Any = {"measured": "balanced"}.get(p.partition_method, p.partition_method)  # tds' name
        stretches = p.stages * p.virtual_pipeline_size if p.stages > 1 else 1
        if p.partition_method == "balanced" and len(layers) >= stretches:
            method = balanced_cuts(layers, stretches, bool(config.recomputed_layers))
        super().__init__(
            layers=[_spec(layer, tied_weights, config.train.seed) for layer in layers],
            topology=mpu.get_topology(),
            loss_fn=loss_fn,
            partition_method=method,
            chunks=p.virtual_pipeline_size,
            example=example,
        )
        self._chunk, self._rng = config.recomputed_layers, mpu.get_rng()
        self._layers = [layers[index] for index in self.indices]
        first_with = {layer.tied: layer.name for layer in reversed(layers) if layer.tied}
        self._names = [first_with[layer.tied] if layer.tied else layer.name for layer in self._layers]
        puts_out = [_boundaries_after(layers[stop - 1]) for _, stop in self.bounds]
        takes_in = [_boundaries_after(layers[start - 1]) if start else None for start, _ in self.bounds]
        self.boundaries: Any = puts_out if self.chunks > 1 else puts_out[0]
        self.receives: Any = takes_in if self.chunks > 1 else takes_in[0]
        init_weights(self, config.train.seed)

    def named_layers(self) -> Iterator[tuple[str, nn.Module]]:
        """(global name, module) of every layer of this stage, tied ones once."""
        seen = set()
        for name, call in zip(self._names, self.forward_funcs, strict=True):
            module = call.args[0] if isinstance(call, partial) else call
            if name not in seen:
                seen.add(name)
                yield name, module

    def forward(self, inputs: Any, chunk: int = 0) -> Any:
        """What comes from the stage before (or the batch) -> what goes to the next (or the logits), through one chunk."""
        mine = slice(*self.stretches[chunk])
        steps = list(zip(self._layers[mine], self.forward_funcs[mine], strict=True))
        # The engine hands over a bare tensor where a boundary has one; our layers want tuples.
        inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        return run(steps, inputs, self._chunk if self.training else 0, self._rng)


def balanced_cuts(layers: Sequence[Layer], stretches: int, recomputed: bool) -> list[int]:
    """Where each stretch begins, and the number of layers, so that the one with the most work has as little as can be.

    What is not counted (an embedding, a norm, a table of positions) stays with the layer after it, unless there are more
    stretches than layers that count. Where nobody has counted, all layers are alike.
    """
    counted = any(layer.work for layer in layers)
    ends = [end for end, layer in enumerate(layers, start=1) if layer.work]
    if len(ends) < stretches or ends[-1] < len(layers):
        ends = list(range(1, len(layers) + 1))
    times = {True: RECOMPUTED, False: FORWARD_AND_BACKWARD}
    chosen = [layers[end - 1] for end in ends]
    costs = [float(layer.work * times[recomputed and layer.repeated]) if counted else 1.0 for layer in chosen]
    return [0, *(ends[cut - 1] for cut in cut_by_time(costs, stretches)[1:])]


def _spec(layer: Layer, tied_weights: dict[str, str], seed: int) -> LayerSpec:
    if layer.tied is None and layer.call is None:
        spec = LayerSpec(layer.cls, *layer.args)
    elif layer.tied is None:  # DeepSpeed knows only calls of tied layers; this one is tied to nothing
        key = layer.name.replace(".", "_")
        spec = TiedLayerSpec(key, layer.cls, *layer.args, forward_fn=layer.call, tied_weight_attr=[])
    else:
        weight = tied_weights[layer.tied]
        spec = TiedLayerSpec(layer.tied, layer.cls, *layer.args, forward_fn=layer.call, tied_weight_attr=weight)
    spec.build = lambda log=False: layer.build(seed)
    return spec


def _boundaries_after(layer: Layer) -> list[Boundary]:
    """What crosses a boundary after this layer."""
    found = [BOUNDARIES[name] for name in layer.puts_out if name in BOUNDARIES]
    whole = mpu.sequence_axis().size > 1
    return [replace(b, split=False) for b in found] if whole else found


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
            loss_fn=TokenLoss.by(config, vocab_size),
            example=_example(config),
        )


class T5ModelPipe(LayerStackPipe):
    """T5 over pipeline stages. Inputs: (encoder tokens [b, k], decoder tokens int32 [b, q], document ids of both or empty).

    In the encoder travel its hidden states, the decoder's tokens and the document ids (int16); in
    the decoder the hidden states of both, and the ids. is_text: see TokenLoss.
    """

    def __init__(self, config: Config, is_text: IsText | None = None) -> None:
        vocab_size = vocab_size_of(config)
        b, d = config.train.batch_size, config.data
        tokens = torch.zeros(b, d.enc_seq_length or d.seq_length, dtype=torch.int64)
        wanted = torch.zeros(b, d.dec_seq_length or d.seq_length // 4, dtype=torch.int32)
        super().__init__(
            t5_layers(config, vocab_size),
            config,
            tied_weights={
                "embedding": "word_embeddings.weight",
                "encoder_positions": "weight",
                "decoder_positions": "weight",
            },
            loss_fn=TokenLoss.by(config, vocab_size, is_text),
            example=(tokens, wanted, no_documents(tokens.device), no_documents(tokens.device)),
        )


def _example(config: Config) -> tuple[Tensor, Tensor, Tensor]:
    """A micro-batch of zeros: what the first layer is given, for cuts by measured time."""
    b, s = config.train.batch_size, config.data.seq_length
    return (
        torch.zeros(b, s // mpu.context_axis().size, dtype=torch.int64),
        torch.zeros(b, s, dtype=torch.int64),
        torch.zeros(0, dtype=torch.int32),
    )
