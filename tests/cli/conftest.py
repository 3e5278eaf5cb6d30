"""Preload transformers, whose import takes six seconds, in the process from which commands are forked."""

from tests.support import preload

preload(
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.t5.modeling_t5",
    "transformers.models.mt5.modeling_mt5",
)
