"""Training task of Llama, Qwen and Mistral models."""

from ..config.defaults import DEFAULTS
from .gpt2 import GPT2


class Llama(GPT2):
    """GPT-2's task with the common default settings of Llama, Qwen and Mistral models.

    The presets in configs/models add the settings of a single model.
    """

    name = "llama"
    defaults = DEFAULTS["llama"]
