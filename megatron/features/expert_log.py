"""How evenly each layer of a model uses its experts, from the numbers that the routers keep of the last step."""

from typing import Any

from .. import mpu
from ..model.layers import global_buffers
from ..ranks.objects import gather_objects
from ..training.feature import Feature, Interval
from ..training.run_state import Run

TOKENS_SUFFIX = ".mlp.router.tokens"  # end of the global name of a router's buffer `tokens`


class ExpertLog(Feature):
    """Feature that adds to each row how many tokens each expert had, and how even the shares are."""

    def start(self, run: Run) -> None:
        self._model = run.engine.deepspeed.module

    def row(self, interval: Interval) -> dict[str, Any]:
        tokens = expert_tokens(self._model)
        layers = {name: balance_of(each) for name, each in tokens.items()}
        return {"layers": layers, "expert_tokens": tokens}


def expert_tokens(model: Any) -> dict[str, list[int]]:
    """Return layer -> number of tokens that each expert had in the last step that was not skipped, in network order.

    Collective over the pipeline stages.
    """
    local_tokens = {}
    for name, tokens in global_buffers(model):
        if name.endswith(TOKENS_SUFFIX):
            local_tokens[name.removesuffix(TOKENS_SUFFIX)] = tokens.tolist()
    all_tokens: dict[str, list[int]] = {}
    for stage in gather_objects(local_tokens, mpu.get_mesh().pipe):
        all_tokens |= stage
    ordered = [name for name in getattr(model, "layer_names", []) if name in all_tokens]
    # A dict keeps the place of a name that is set again. So layers in network order come first, and any others follow.
    return {name: all_tokens[name] for name in ordered} | all_tokens


def balance_of(tokens: list[int]) -> dict[str, float | None]:
    """Return the metrics of a layer whose experts had these numbers of tokens.

    imbalance: largest share of an expert times the number of experts; 1 if all shares are equal.
    dead_experts: number of experts without tokens. Both are None before the first step that was not skipped.
    """
    if not any(tokens):
        return {"imbalance": None, "dead_experts": None}
    imbalance = max(tokens) * len(tokens) / sum(tokens)
    return {"imbalance": imbalance, "dead_experts": tokens.count(0)}
