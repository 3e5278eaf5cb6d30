"""Layers before the first transformer layer and after the last.

Shapes: s sequence, b batch, h hidden, v vocabulary, t model-parallel ranks.
"""

import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.config import ModelConfig

from .block import Dropout
from .masks import DocumentRole
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
        self.logits_scale = config.logits_scale
        needs_all_logits = "cross-entropy" in config.reference_ops  # for torch's own cross entropy
        self.logits_chunk_size = 0 if needs_all_logits else config.logits_chunk_size

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Embed (tokens [b, s], position ids [b, s], document ids) -> (hidden [s, b, h], position ids, document ids).

        On each of c context-parallel ranks, tokens and hidden states are the rank's own, [b, s/c] and [s/c, b, h];
        position and document ids are those of the whole sequence.
        """
        tokens, position_ids, document_ids = inputs
        return self.word_embeddings(tokens.t()), position_ids, document_ids

    def project_to_logits(self, hidden: Tensor) -> "Tensor | mpu.DeferredLogits":
        """Return logits [s, b, v/t] of hidden [s, b, h], including the logits of the vocabulary's padding.

        With more tokens than --logits-chunk-size, return `DeferredLogits`, which compute the logits in chunks.
        """
        if self.logits_scale != 1.0:
            hidden = hidden * self.logits_scale
        tokens = mpu.whole_length(hidden, self.sequence) * hidden.shape[1]
        if self.logits_chunk_size and tokens > self.logits_chunk_size:
            return self.word_embeddings.deferred_logits(hidden, self.logits_chunk_size)
        return self.word_embeddings.logits(hidden)

    @staticmethod
    def run_output_layer(embedding: "WordEmbedding", inputs: tuple[Tensor, ...]) -> "Tensor | mpu.DeferredLogits":
        """Return logits [s, b, v/t] or DeferredLogits of inputs (hidden [s, b, h], ...), see `project_to_logits`."""
        return embedding.project_to_logits(inputs[0])


class ModelStart(nn.Module):
    """Start of a model, or of an encoder or decoder stack: learned positions, if the model has them, and dropout.

    positions: number of learned positions. name: name of the dropout stream.
    """

    def __init__(self, config: ModelConfig, positions: int, name: str) -> None:
        super().__init__()
        self.num_positions = positions
        self.sequence = mpu.sequence_axis()
        self.weight: nn.Parameter | None = None
        if config.position_embedding == "learned":
            weight = nn.Parameter(torch.empty(positions, config.hidden_size))
            self.weight = mpu.declare(weight, mpu.normal(config.init_method_std), sequence=self.sequence)
        self.dropout = Dropout(config.hidden_dropout, name)

    def check_length(self, length: int) -> None:
        """Raise ValueError if a sequence of `length` tokens has more positions than the learned table."""
        if length > self.num_positions:
            raise ValueError(
                f"a sequence of {length} tokens is longer than the {self.num_positions} learned positions of the "
                f"model; shorten it, or train a model with a larger --max-position-embeddings"
            )

    def look_up_positions(self, positions: Tensor) -> Tensor:
        """Look up the vectors of positions [s, b] or [s, 1] -> [s, b or 1, h], with sequence parallelism [s/t, ...]."""
        assert self.weight is not None
        local_positions = mpu.local_shard(positions, axis=self.sequence)
        return mpu.embedding(local_positions, self.weight)


class DecoderStart(ModelStart):
    """Start of a decoder-only model: learned positions and dropout. Rotary positions are applied later, in the blocks.

    role: whether document ids restrict attention, restart positions, or both. If they only restart rotary positions,
    the caller must pass an empty tensor of document ids. This layer then computes document ids from the position ids: a
    document begins at each position id of 0. A rotary model uses position ids for nothing else.
    """

    def __init__(self, config: ModelConfig, positions: int, name: str, role: DocumentRole) -> None:
        super().__init__(config, positions, name)
        self.role = role
        self.context = mpu.context_axis()

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Add positions: (hidden [s, b, h], position ids [b, s], document ids) -> (hidden, document ids).

        Raises ValueError for document ids that contradict the flags.
        """
        hidden, position_ids, document_ids = inputs
        if self.weight is not None:
            self.check_length(position_ids.shape[-1])
            positions = mpu.shard_sequence(position_ids.t(), 0, self.context)  # [s, b]
            hidden = hidden + self.look_up_positions(positions)
        elif not self.role.restricts_attention:
            if document_ids.numel():
                raise ValueError(
                    "the document ids restrict attention, but --reset-position-ids is given without "
                    "--reset-attention-mask; give both flags, or pass no document ids"
                )
            document_ids = (position_ids == 0).cumsum(1).int()  # a document begins at each position 0
        return self.dropout(hidden), document_ids


class StackNorm(nn.Module):
    """Final norm of a pre-norm stack of layers: a decoder-only model, an encoder or a decoder."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = build_norm(config)

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Normalise the hidden states of (hidden [s, b, h], ...)."""
        hidden, *rest = inputs
        return self.norm(hidden), *rest
