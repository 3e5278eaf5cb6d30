"""The flag --log-layers: norms, updates, activations and attention logits of each layer, equal in every layout."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tds.groups import max_with_nan
from tds.step_norms import StepNorms, squared_norm

from .. import mpu
from .._torch import is_compiled
from ..engines.engine import StepResult
from ..model.attention import Attention
from ..model.attention_kernels import AttentionArgs
from ..model.attention_logits import largest_logit
from ..model.layers import Layer, global_parameters
from ..model.text_tokens import text_tokens
from ..ranks.objects import gather_objects
from ..ranks.rank_0 import print_rank_0
from ..training.feature import Feature, Interval
from ..training.health import SampleRange
from ..training.run_state import Run

METRICS = "weight_norm", "grad_norm", "update_ratio", "activation_rms", "attention_logit"
Metrics = dict[str, float | None]  # of a layer; None for NaN and Inf


class LayerLog(Feature):
    """Feature that measures each layer in the iterations of log lines.

    Activations are the outputs of transformer layers. Padding does not count. Models that are not a list of layers have
    no activations and logits, and compiled layers have no logits.
    metrics: layer -> metric -> value of the last measured iteration; empty if none was measured since the last log
    line.
    """

    def start(self, run: Run) -> None:
        self._run = run
        self._engine = run.engine.deepspeed
        model = self._engine.module
        self._model = model

        # Names of all layers of the model, in the same order on all ranks, so that each has the same index everywhere.
        parameters = list(global_parameters(model))
        self._layers = dict(model.named_layers()) if hasattr(model, "named_layers") else {}  # of this stage
        layer_of = {}
        for name, _ in parameters:
            # The longest name is that of the innermost layer. Outside of layers, the module that holds the parameter
            # takes its place; a parameter of the model itself has no module in its name.
            module = name.rpartition(".")[0] or name
            found = (layer for layer in self._layers if name.startswith(f"{layer}."))
            layer_of[name] = max(found, key=len, default=module)
        # Each rank knows only the layers of its stage, so the sets of all ranks are joined.
        all_layers: set[str] = set().union(*gather_objects(set(layer_of.values())))
        ordered = [name for name in getattr(model, "layer_names", []) if name in all_layers]
        # First the layers of the network in its order, then the modules outside of layers; a dict drops repeats.
        self.names = list(dict.fromkeys([*ordered, *sorted(all_layers)]))
        self._layer_index = {name: index for index, name in enumerate(self.names)}

        # Norms of weights, gradients and updates: each parameter counts on one model-parallel rank only.
        mesh = mpu.get_mesh()
        index_of_parameter = {}
        for name, p in parameters:
            if mpu.is_unique_param(p, mesh.model.rank):
                index_of_parameter[p] = self._layer_index[layer_of[name]]
        self._norms = StepNorms(self._engine, index_of_parameter, len(self.names), first_replica=mesh.data.rank == 0)

        # Attention logits; `before_step` sets the tensors for them and for activations.
        self._attentions: list[tuple[int, Any]] = []  # (index of its layer, module) of each attention of this stage
        if any(map(is_compiled, model.modules())):
            print_rank_0(
                "note: --log-layers leaves out attention logits, as layers are compiled; --no-compile logs them"
            )
        else:
            for name, layer in self._layers.items():
                for module in layer.modules():
                    if isinstance(module, Attention):
                        self._attentions.append((self._layer_index[name], module))
        self._text_mask: Tensor | None = None  # bool [b, q]: queries of the current layer that are text; None: all
        self._is_measuring = False
        self.metrics: dict[str, Metrics] = {}

    def before_step(self, iteration: int) -> None:
        """Prepare to measure the iteration if it ends with a log line."""
        if not self._run.log.is_due(iteration):
            return
        self._is_measuring = True
        zeros: Callable[..., Tensor] = partial(torch.zeros, dtype=torch.float64, device=self._engine.device)
        self._activations = zeros(2, len(self.names))  # sums of squares, numbers of elements
        self._logits = zeros(len(self.names)) - math.inf  # -inf until a logit is seen
        self._norms.begin()
        if hasattr(self._model, "observe"):
            self._model.observe = self._record_activations
        for index, module in self._attentions:
            module.observe_call = partial(self._record_logits, index)

    def _record_activations(self, layer: Layer, call: Callable[[Any], Any], inputs: Any) -> Any:
        """Call a layer in place of the model, and add the squares of its output to the sums of the layer."""
        if not (layer.repeated and self._model.training):  # measure only transformer layers, in training
            return call(inputs)
        ids = inputs[_index_of_ids(layer)]
        context = mpu.context_axis()
        # Attention sees the whole sequence of this context-parallel rank, while hidden states may be sharded along it.
        queries = text_tokens(ids, mpu.TRIVIAL_AXIS, context)
        self._text_mask = None if queries is None else queries.mask.t()
        outputs = call(inputs)
        hidden = outputs[0].detach()  # [s, b, h]
        shard_text = text_tokens(ids, mpu.sequence_axis(), context)
        if shard_text is not None:
            hidden = hidden[shard_text.mask]  # [text tokens, h], as padding does not count
        square = squared_norm(hidden)
        index = self._layer_index[layer.name]
        # The row of sums of squares and the row of numbers of elements.
        self._activations[:, index] += torch.stack([square, torch.full_like(square, hidden.numel())])
        return outputs

    def _record_logits(self, index: int, call: AttentionArgs) -> None:
        """Update the largest attention logit of a layer."""
        # Recomputed layers have already been recorded in the forward pass.
        if self._model.training and not mpu.get_rng().recomputing:
            self._logits[index] = torch.maximum(self._logits[index], largest_logit(call, self._text_mask).double())

    def after_step(self, step: StepResult | None, samples: SampleRange) -> None:
        """Set `metrics`, if this iteration was measured. All ranks must call this."""
        self.metrics = {}
        if not self._is_measuring:
            return
        self._is_measuring = False
        if hasattr(self._model, "observe"):
            self._model.observe = None
        for _, module in self._attentions:
            module.observe_call = None
        sums = torch.cat([self._norms.take(), self._activations])
        if step is None:
            return
        dist.all_reduce(sums)
        self._logits = max_with_nan(self._logits)
        norm = math.inf if step.skipped else float(step.grad_norm)
        self.metrics = self._compute_metrics(sums, norm)

    def row(self, interval: Interval) -> dict[str, Any]:
        return {"layers": dict(self.metrics)} if self.metrics else {}

    def _compute_metrics(self, sums: Tensor, norm: float) -> dict[str, Metrics]:
        """Return layer -> metric -> value, None if it is not finite.

        A layer without activations or without attention has no such metric.
        norm: gradient norm of the model, infinite if the step was skipped.
        """
        weights, gradients, updates, activations, counts = sums.cpu()
        # The optimizer may get scaled and clipped gradients, all by the same factor. `unscale` undoes this factor; NaN
        # if it is not known.
        optimizer_norm = math.sqrt(float(gradients.sum()))
        unscale = norm / optimizer_norm if optimizer_norm and math.isfinite(norm) else math.nan
        logits = self._logits.cpu()
        columns = (  # in the order of METRICS, [layers] each
            weights.sqrt(),
            gradients.sqrt() * unscale,
            (updates / weights).sqrt(),
            (activations / counts).sqrt(),
            logits,
        )
        all_metrics = {}
        for name, row, count in zip(self.names, torch.stack(columns, 1).tolist(), counts.tolist(), strict=True):
            metrics = {}
            for metric, value in zip(METRICS, row, strict=True):
                metrics[metric] = value if math.isfinite(value) else None
            if not count:  # the layer has no activations, or only padding
                del metrics["activation_rms"]
            if row[-1] == -math.inf:  # the last column: no logit was seen
                del metrics["attention_logit"]
            all_metrics[name] = metrics
        return all_metrics


def _index_of_ids(layer: Layer) -> int:
    """Return the index of the document ids of the layer's tokens among its inputs and among its outputs."""
    outputs = layer.outputs
    if "encoded" in outputs:  # a layer of a T5 decoder, which also passes on what the encoder has computed
        return outputs.index("decoder_document_ids")
    if "encoder_document_ids" in outputs:
        return outputs.index("encoder_document_ids")
    return outputs.index("document_ids")
