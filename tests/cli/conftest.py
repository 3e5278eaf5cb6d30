"""Import transformers, which takes six seconds, and pyplot once in the fork server that runs the tests' commands."""

from tests.support import preload

preload(
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.t5.modeling_t5",
    "transformers.models.mt5.modeling_mt5",
    "matplotlib.pyplot",  # a second of each report
)
