"""Import transformers, which takes six seconds, and modules of tools once in the fork server of the tests' commands."""

from tests.support import preload

preload(
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.t5.modeling_t5",
    "transformers.models.mt5.modeling_mt5",
    "megatron_tools.convert.convert_checkpoint",  # 60 modules of about 60 commands
    "megatron_tools.write.evaluate",
    "megatron_tools.write.generate",
    "matplotlib.pyplot",  # a second of each report
)
