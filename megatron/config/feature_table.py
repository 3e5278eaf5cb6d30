"""Optional parts of a run: where each lives, which settings ask for it, and the order in which a run calls them.

To add a feature, write a file with a subclass of `megatron.training.Feature`, and add a row here.
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class Row(NamedTuple):
    """One feature.

    class_path: its module and class. wanted: function that says whether the settings, a `Config`, ask for it.
    section: section of the settings that its class `Settings` adds to; None if it has none of its own.
    instead: whether its method `instead` takes the place of the whole run.
    """

    class_path: str
    wanted: Callable[[Any], bool]
    section: str | None = None
    instead: bool = False


def always(config: Any) -> bool:
    """Return True: every run has the feature."""
    return True


def _may_pad(config: Any) -> bool:
    return config.model.family is not None and (config.is_t5 or config.objective == "sft")


TABLE = {
    "dry_run": Row("megatron.features.dry_run:DryRun", lambda c: c.train.dry_run > 0, "train", instead=True),
    "notes": Row("megatron.features.notes:Notes", always),
    "memory_estimate": Row("megatron.features.memory_estimate:MemoryEstimate", always),
    "freezing": Row("megatron.features.freezing:Freezing", lambda c: c.optim.param_groups is not None),
    "compilation": Row("megatron.features.compiling:Compilation", lambda c: c.train.compile is not False),
    "cpu_matmul": Row("megatron.features.cpu_matmul:CpuMatmul", lambda c: c.train.cpu_matmul == "auto"),
    "fp8": Row("megatron.features.fp8:Fp8", lambda c: c.train.precision == "fp8"),
    # The average comes before the guard, whose hook on the optimizer restores the gradients of a skipped step.
    "weight_average": Row("megatron.features.weight_average:Average", lambda c: c.optim.ema_decay is not None),
    "spike_guard": Row("megatron.features.spike_guard:Guard", lambda c: c.train.skip_step_sigma is not None, "train"),
    "writers": Row("megatron.features.writers:Writers", always),
    "recording": Row("megatron.features.recording:Recording", lambda c: c.log.trace),
    "profile": Row("megatron.features.profile:Profile", lambda c: c.log.profile),
    "first_step": Row("megatron.features.first_step:FirstStep", always),
    "garbage": Row("megatron.features.garbage:Garbage", lambda c: c.train.manual_gc_interval > 0, "train"),
    "padding": Row("megatron.features.padding:Padding", _may_pad),
    # The log of experts adds to the entries of layers.
    "layer_log": Row("megatron.features.layer_log:LayerLog", lambda c: c.log.log_layers),
    "expert_log": Row("megatron.features.expert_log:ExpertLog", lambda c: c.model.num_experts is not None),
    "corpus_losses": Row("megatron.features.corpus_losses:CorpusLosses", lambda c: c.data.names_corpora),
    "corpus_checks": Row("megatron.features.corpus_checks:CorpusChecks", lambda c: c.data.names_corpora),
    "bits_per_byte": Row("megatron.features.bits_per_byte:BitsPerByte", always),
    "stragglers": Row("megatron.features.stragglers:Stragglers", always),
    "samples": Row("megatron.features.samples:Samples", lambda c: bool(c.train.sample_prompt), "train"),
    "eval_tasks": Row("megatron.features.eval_tasks:TaskEvaluations", lambda c: bool(c.train.eval_tasks)),
}
