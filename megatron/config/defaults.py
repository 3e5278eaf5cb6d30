"""Overrides of the default settings, by model family of the training script."""

from typing import Any

DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": {"family": "gpt2"},
    "llama": {
        "family": "llama",
        "position_embedding": "rope",
        "normalization": "rmsnorm",
        "activation": "swiglu",
        "hidden_bias": False,
        "tie_embeddings": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "t5": {"family": "t5", "enc_seq_length": 512},
}
