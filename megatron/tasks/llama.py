"""Llama, Qwen and Mistral: the next token of running text, by a decoder of today."""

from .gpt2 import GPT2


class Llama(GPT2):
    """GPT-2's task. Only what a model of this family usually is differs; the presets in configs/models say the rest of each."""

    name = "llama"
    defaults = {
        "family": "llama",
        "position_embedding": "rope",
        "normalization": "rmsnorm",
        "activation": "swiglu",
        "hidden_bias": False,
        "tie_embeddings": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
