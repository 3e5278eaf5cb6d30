"""A task without corpus and tokenizer, to which tests pass token ids."""

from typing import Any

import torch
from torch import Tensor, nn

from megatron.config import Config
from megatron.model import GPT2Model, T5Model
from megatron.training.task import Task


class TextTask(Task):
    """A task that trains GPT-2 or T5 without a pipeline on batches of token ids, which every rank reads.

    A batch for GPT-2 is {"text": [b, s + 1]}. A batch for T5 is {"text": [b, k], "wanted": [b, q + 1]}: the encoder's
    tokens, and the tokens that the decoder learns to predict.
    """

    def model(self, config: Config, tokenizer: Any) -> nn.Module:
        return (T5Model if config.is_t5 else GPT2Model)(config)

    def batch(self, data: dict[str, Tensor] | None, config: Config, tokenizer: Any) -> tuple[Any, Any]:
        assert data is not None
        text = data["text"]
        wanted = data["wanted"] if config.is_t5 else text
        inputs = (text, wanted[:, :-1]) if config.is_t5 else (text[:, :-1],)
        return inputs, (wanted[:, 1:], torch.ones_like(wanted[:, 1:]))
