"""Which settings ask for which feature, where it lives, and the order in which features are called.

To add a feature, write a file with a subclass of `megatron.training.Feature`, and add a row here.
"""

from collections.abc import Callable
from typing import NamedTuple

from ..config import Config


class Row(NamedTuple):
    """wanted: function that says whether the settings ask for the feature. home: its module and class."""

    wanted: Callable[[Config], bool]
    home: str


def _may_pad(config: Config) -> bool:
    return config.model.family is not None and (config.is_t5 or config.objective == "sft")


TABLE = {
    "memory_estimate": Row(lambda c: True, "megatron.features.memory_estimate:MemoryEstimate"),
    "freezing": Row(lambda c: c.optim.param_groups is not None, "megatron.features.freezing:Freezing"),
    "compilation": Row(lambda c: c.train.compile is not False, "megatron.features.compiling:Compilation"),
    "fp8": Row(lambda c: c.train.precision == "fp8", "megatron.features.fp8:Fp8"),
    # The average comes before the guard: the guard must see the step that the average wraps.
    "weight_average": Row(lambda c: c.optim.ema_decay is not None, "megatron.features.weight_average:Average"),
    "spike_guard": Row(lambda c: c.train.skip_step_sigma is not None, "megatron.features.spike_guard:Guard"),
    "writers": Row(lambda c: True, "megatron.features.writers:Writers"),
    "recording": Row(lambda c: c.log.trace or c.log.profile, "megatron.features.recording:Recording"),
    "first_step": Row(lambda c: True, "megatron.features.first_step:FirstStep"),
    "garbage": Row(lambda c: c.train.manual_gc_interval > 0, "megatron.features.garbage:Garbage"),
    "padding": Row(_may_pad, "megatron.features.padding:Padding"),
    # The log of experts adds to the entries of layers.
    "layer_log": Row(lambda c: c.log.log_layers, "megatron.features.layer_log:LayerLog"),
    "expert_log": Row(lambda c: c.model.num_experts is not None, "megatron.features.expert_log:ExpertLog"),
    "corpus_losses": Row(lambda c: c.data.names_corpora, "megatron.features.corpus_losses:CorpusLosses"),
    "stragglers": Row(lambda c: True, "megatron.features.stragglers:Stragglers"),
    "eval_tasks": Row(lambda c: bool(c.train.eval_tasks), "megatron.features.eval_tasks:TaskEvaluations"),
}
