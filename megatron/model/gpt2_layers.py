"""GPT-2 (Radford et al. 2019) as one list of layers; other settings give Llama, Qwen and Mistral.

        tokens, positions -> embedding -> Block x num_layers -> norm -> (tied) logits

GPT-2 adds a learned position vector to each token's embedding. Llama, Qwen and Mistral instead rotate queries and keys
in their blocks (`rotary.py`; Touvron et al. 2023, Jiang et al. 2023).

Shapes: s sequence, b batch, h hidden, v vocabulary, t model-parallel ranks.
"""

import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.config import Config, ModelConfig

from .block import Block, Dropout, build_norm
from .layers import Layer
from .masks import DocumentRole, document_role_of
from .work import block_work, sample_lengths


def gpt2_layers(config: Config, vocab_size: int) -> list[Layer]:
    """Return the layers in order; with tied embeddings the last layer shares the weight of the first layer.

    Raises ValueError for T5 settings.
    """
    m = config.model
    if config.is_t5:
        raise ValueError("a GPT-2 cannot be built from settings of family t5; use T5Model or pretrain_t5.py")
    if m.position_embedding == "relative":
        raise ValueError("--position-embedding relative is for T5; choose learned (as in GPT-2) or rope (as in Llama)")
    role = document_role_of(config)  # whether document ids restrict attention and restart positions
    tied = "embedding" if m.tie_embeddings else None  # layers with this key share one module
    embedding_outputs = ("hidden", "position_ids", "document_ids")
    start_name = "start" if m.position_embedding == "rope" else "position_embedding"  # "start": only dropout
    layers = [
        Layer("embedding", WordEmbedding, (m, vocab_size), tied=tied, outputs=embedding_outputs),
        Layer(start_name, DecoderStart, (m, config.positions, start_name, role)),
        *(_block(config, i, role) for i in range(m.num_layers)),
        Layer("final_norm", StackNorm, (m,)),
        output_layer(config, vocab_size),
    ]
    if m.num_experts is None:  # no mixture of experts, so no router
        return layers
    from .routing import with_router_loss

    return with_router_loss(layers)


def _block(config: Config, i: int, role: DocumentRole) -> Layer:
    """Return transformer layer i, not built yet."""
    m = config.model
    name = f"layers.{i}"
    work = block_work(m, config.data.seq_length, i)
    return Layer(name, Block, (m, name, role), repeated=True, work=work, routes=m.has_experts(i))


def output_layer(config: Config, vocab_size: int) -> Layer:
    """Return the last layer, which computes the logits with the embedding's weight (--no-tie-embeddings: its own)."""
    m = config.model
    tied = "embedding" if m.tie_embeddings else None
    encoder_length, decoder_length = sample_lengths(config)
    output_length = decoder_length or encoder_length  # tokens that get logits; only a T5 has a decoder
    work = output_length * m.hidden_size * vocab_size  # multiply-adds for one sample
    call = WordEmbedding.run_output_layer  # instead of `forward`, which looks up tokens
    return Layer("head", WordEmbedding, (m, vocab_size), tied=tied, call=call, outputs=("logits",), work=work)


def vocab_size_of(config: Config) -> int:
    """Return the vocabulary size of the model. Raises ValueError if it is not set."""
    if config.model.vocab_size is None:
        raise ValueError("the vocabulary size is not known: give --vocab-size or --vocab-file")
    return config.model.vocab_size


class WordEmbedding(nn.Module):
    """Token embedding, whose weight also maps hidden states to logits at the end of the model."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        init = mpu.normal(config.init_method_std)
        multiple = config.make_vocab_size_divisible_by  # the table is padded to a multiple of this times t
        self.word_embeddings = mpu.VocabParallelEmbedding(vocab_size, config.hidden_size, init, multiple=multiple)
        self.sequence = mpu.sequence_axis()
        self.logits_scale = config.logits_scale
        needs_all_logits = "cross-entropy" in config.reference_ops  # for torch's own cross entropy
        self.logits_chunk_size = 0 if needs_all_logits else config.logits_chunk_size  # in tokens; 0: no chunks

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Embed (tokens [b, s], position ids [b, s], document ids) -> (hidden [s, b, h], position ids, document ids).

        On each of c context-parallel ranks, tokens and hidden states are the rank's own, [b, s/c] and [s/c, b, h];
        position and document ids are those of the whole sequence.
        """
        tokens, position_ids, document_ids = inputs
        return self.word_embeddings(tokens.t()), position_ids, document_ids

    def run_output_layer(self, inputs: tuple[Tensor, ...]) -> "Tensor | mpu.DeferredLogits":
        """Return logits [s, b, v/t] of (hidden [s, b, h], ...), including the logits of the vocabulary's padding.

        With more tokens than --logits-chunk-size, return `DeferredLogits`, which compute the logits in chunks.
        """
        hidden = inputs[0]
        if self.logits_scale != 1.0:  # with muP, or with the scaled tied logits of T5
            hidden = hidden * self.logits_scale
        tokens = mpu.whole_length(hidden, self.sequence) * hidden.shape[1]  # s * b, also if this rank has [s/t, b, h]
        if self.logits_chunk_size and tokens > self.logits_chunk_size:
            return self.word_embeddings.deferred_logits(hidden, self.logits_chunk_size)
        return self.word_embeddings.logits(hidden)


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
    the caller must pass an empty tensor of document ids. This layer then computes document ids from the position ids,
    which a rotary model uses for nothing else.
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
        if self.weight is not None:  # learned positions
            self.check_length(position_ids.shape[-1])
            positions = mpu.shard_sequence(position_ids.t(), 0, self.context)  # [s, b]
            hidden = hidden + self.look_up_positions(positions)
        if not self.role.restricts_attention:  # then positions are rotary, and document ids only restart them
            if document_ids.numel():  # the caller must pass an empty tensor
                raise ValueError(
                    "the document ids restrict attention, but --reset-position-ids is given without "
                    "--reset-attention-mask; give both flags, or pass no document ids"
                )
            # A document begins at each position 0: positions 0 1 2 0 1 give the document ids 1 1 1 2 2.
            document_ids = (position_ids == 0).cumsum(1).int()
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
