"""AdamW whose moments are kept in bf16 between steps: --exp-avg-dtype and --exp-avg-sq-dtype."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw

CHUNK_ELEMENTS = 1 << 20  # elements of a weight that are stepped together; this bounds the memory of a step


class RoundedAdamW(torch.optim.AdamW):
    """torch's fused AdamW, which reads moments of lower precision and rounds them to nearest after its step.

    A step is computed in the dtype of the weights, so only the stored moments are rounded.
    moment_dtypes: dtypes of the rounded moments, by their names (exp_avg, exp_avg_sq); others have that of the weights.
    settings: of torch.optim.AdamW.
    """

    steps_separately = True  # counts the steps of each weight, see `tds.DistributedOptimizer`

    def __init__(
        self, groups: Sequence[dict[str, Any]], moment_dtypes: Mapping[str, torch.dtype], **settings: Any
    ) -> None:
        super().__init__(groups, fused=True, **settings)
        self.moment_dtypes = moment_dtypes

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Step all weights that have a gradient. An engine computes the gradients before, so there is no closure."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step_weight(weight, group)

    def _step_weight(self, weight: Tensor, group: Mapping[str, Any]) -> None:
        """Step one weight [any shape] with the settings of its group, one chunk after another."""
        state = self.state[weight]
        if not state:  # the first step
            state["step"] = torch.zeros((), device=weight.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(weight, dtype=self.moment_dtypes.get(name))

        beta1, beta2 = group["betas"]
        settings = {key: group[key] for key in ("lr", "weight_decay", "eps", "amsgrad", "maximize", "fused")}
        for name in ("grad_scale", "found_inf"):  # set by tds.optimizers.clip_in_step
            settings[name] = getattr(self, name, None)
        tensors = [weight, cast(Tensor, weight.grad), state["exp_avg"], state["exp_avg_sq"]]
        for chunk, grad, stored_avg, stored_avg_sq in _chunks(tensors):  # at least one chunk, perhaps empty
            exp_avg = stored_avg.to(chunk.dtype)
            exp_avg_sq = stored_avg_sq.to(chunk.dtype)
            step = state["step"].clone()  # `adamw` counts it up; each chunk makes the same step
            # torch's function takes a list for each kind of tensor; [] is for amsgrad's, which is off.
            adamw([chunk], [grad], [exp_avg], [exp_avg_sq], [], [step], beta1=beta1, beta2=beta2, **settings)
            stored_avg.copy_(exp_avg)
            stored_avg_sq.copy_(exp_avg_sq)
        state["step"].copy_(step)


def _chunks(tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Yield views of the same CHUNK_ELEMENTS elements of each of `tensors`, which have one shape.

    Tensors that are not contiguous have no flat view, so they are one chunk.
    """
    if not all(tensor.is_contiguous() for tensor in tensors):
        yield tensors
        return
    # Tensors with chunks (a, b) and (c, d) give (a, c), then (b, d).
    yield from zip(*[torch.split(tensor.view(-1), CHUNK_ELEMENTS) for tensor in tensors], strict=True)
