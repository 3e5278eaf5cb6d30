"""Layers before the first transformer layer and after the last.

Shapes: s sequence, b batch, h hidden, v vocabulary, t model-parallel ranks.
"""

import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.config import Config, ModelConfig

from .block import Dropout
from .layers import global_parameters
from .norm import build_norm


class WordEmbedding(nn.Module):
    """Token embedding, whose weight also maps hidden states to logits at the end of the model."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.word_embeddings = mpu.VocabParallelEmbedding(
            vocab_size,
            config.hidden_size,
            init_method=mpu.normal(config.init_method_std),
            multiple=config.make_vocab_size_divisible_by,
        )
        self.sequence = mpu.sequence_axis()
        self.chunk = config.logits_chunk_size if "cross-entropy" not in config.reference_ops else 0

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Embed (tokens [b, s], position ids [b, s], document ids) -> (hidden [s, b, h], the others).

        With context parallelism tokens are this rank's, [b, s/c], and so are the hidden states; the others
        are of the whole sequence.
        """
        tokens, position_ids, document_ids = inputs
        return self.word_embeddings(tokens.t()), position_ids, document_ids

    def output(self, hidden: Tensor) -> Tensor | mpu.DeferredLogits:
        """Return logits [s, b, v/t] of hidden [s, b, h], padding included; deferred if they exceed one chunk."""
        if self.chunk and mpu.whole_length(hidden, self.sequence) * hidden.shape[1] > self.chunk:
            return self.word_embeddings.deferred_logits(hidden, self.chunk)
        return self.word_embeddings.logits(hidden)

    @staticmethod
    def logits(embedding: "WordEmbedding", inputs: tuple[Tensor, Tensor]) -> Tensor | mpu.DeferredLogits:
        """Return what `output` computes from (hidden [s, b, h], document ids)."""
        return embedding.output(inputs[0])


class PositionEmbedding(nn.Module):
    """Learned vector added for each position, then dropout."""

    looks_up = True

    def __init__(self, config: ModelConfig, positions: int, name: str) -> None:
        super().__init__()
        self.positions = positions
        weight = nn.Parameter(torch.empty(positions, config.hidden_size))
        self.sequence, self.context = mpu.sequence_axis(), mpu.context_axis()
        self.weight = mpu.declare(weight, mpu.normal(config.init_method_std), sequence=self.sequence)
        self.dropout = Dropout(config.hidden_dropout, name)

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Add positions: (hidden [s, b, h], position ids [b, s], document ids) -> (hidden, document ids)."""
        hidden, position_ids, document_ids = inputs
        if position_ids.shape[-1] > self.positions:
            raise ValueError(
                f"a sequence of {position_ids.shape[-1]} tokens is longer than the {self.positions} learned positions"
            )
        own = mpu.own_tokens(position_ids.t(), 0, self.context)
        vectors = nn.functional.embedding(mpu.local_shard(own, axis=self.sequence), self.weight)
        return self.dropout(hidden + vectors), document_ids


class RotaryStart(nn.Module):
    """Start of a model with rotary positions: only dropout, because blocks rotate queries and keys themselves.

    With --reset-position-ids blocks count positions by document. Without --reset-attention-mask no document
    ids are given, so they are derived here from positions that restart at 0, and serve only to count
    positions. Other positions are not supported.
    """

    def __init__(self, config: Config, name: str) -> None:
        super().__init__()
        d = config.data
        self.makes_ids = d.reset_position_ids and not d.reset_attention_mask and config.objective == "lm"
        self.dropout = Dropout(config.model.hidden_dropout, name)

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Apply dropout: (hidden [s, b, h], position ids [b, s], document ids) -> (hidden, document ids).

        Raises ValueError for document ids that contradict the flags.
        """
        hidden, position_ids, document_ids = inputs
        if self.makes_ids:
            if document_ids.numel():
                raise ValueError(
                    "document ids keep documents apart, but --reset-position-ids is given without --reset-attention-mask"
                )
            document_ids = (position_ids == 0).cumsum(1).int()
        return self.dropout(hidden), document_ids


class FinalNorm(nn.Module):
    """Norm after the last layer of a pre-norm model."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = build_norm(config)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Normalise the hidden states of (hidden [s, b, h], document ids)."""
        hidden, document_ids = inputs
        return self.norm(hidden), document_ids


def embedding_weights(model: nn.Module) -> set[nn.Parameter]:
    """Return the token and position tables, including an output weight that is tied to one of them."""
    tables = [
        m
        for m in model.modules()
        if isinstance(m, (nn.Embedding, mpu.VocabParallelEmbedding)) or hasattr(m, "looks_up")
    ]
    found = {p for table in tables for p in table.parameters(recurse=False)}
    return found - {p for name, p in global_parameters(model) if name.startswith("head.")}
