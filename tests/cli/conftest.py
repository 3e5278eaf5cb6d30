"""Commands here often import transformers, which takes six seconds: the process they are forked from does it once."""

from tests.support import preload

preload(
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.t5.modeling_t5",
    "transformers.models.mt5.modeling_mt5",
)
