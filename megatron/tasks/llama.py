"""Llama, Qwen and Mistral: the next token of running text, by a decoder of today."""

from ..config.defaults import DEFAULTS
from .gpt2 import GPT2


class Llama(GPT2):
    """GPT-2's task. Only what a model of this family usually is differs; the presets in configs/models say the rest of each."""

    name = "llama"
    defaults = DEFAULTS["llama"]
