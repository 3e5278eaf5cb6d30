"""Task of Llama, Qwen and Mistral: predict the next token of running text."""

from ..config.defaults import DEFAULTS
from .gpt2 import GPT2


class Llama(GPT2):
    """GPT-2's task with the usual defaults of a Llama; the presets in configs/models complete them."""

    name = "llama"
    defaults = DEFAULTS["llama"]
