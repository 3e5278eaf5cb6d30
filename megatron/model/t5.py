"""T5 (Raffel et al. 2020) as one list of layers; the settings choose between T5 v1.1, CPM-2 and UMT5.

        encoder tokens -> embedding -> start -> EncoderBlock x n -> norm -> encoded
        decoder tokens -> (same) embedding -> start -> DecoderBlock x m -> norm -> logits
                                                            ^ encoded

With relative positions, the table of a stack is a tied layer before each of its blocks, so every stage has
the table wherever stage boundaries fall. UMT5 (Chung et al. 2023) has a separate table for each block.
Shapes: q decoder sequence, k encoder sequence, s either, b batch, h hidden, v vocabulary, t model-parallel
ranks.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.config import Config, ModelConfig

from .block import Dropout, TransformerLayer, build_norm
from .cache import Caches
from .cross_attention import Encoded, build_cross_attention
from .gpt2 import LanguageModel
from .gpt2_layers import ModelStart, StackNorm, WordEmbedding, output_layer
from .layers import Layer
from .masks import document_scope, no_documents, positions_in_documents
from .relative import RelativePositions, position_bias
from .routing import with_router_loss
from .work import block_work, sample_lengths

ENCODER_TENSORS = ("hidden", "decoder_tokens", "encoder_document_ids", "decoder_document_ids")
DECODER_TENSORS = ("hidden", "encoded", "encoder_document_ids", "decoder_document_ids")
Tensors = tuple[Tensor, ...]


def embed_encoder(embedding: WordEmbedding, inputs: Tensors) -> Tensors:
    """Embed the encoder tokens of (encoder tokens [b, k], decoder tokens [b, q], document ids of both).

    Returns (encoder hidden states [k, b, h], decoder tokens, document ids of both).

    Raises ValueError if only one of encoder and decoder has document ids.
    """
    tokens, decoder_tokens, encoder_ids, decoder_ids = inputs
    # Ids may be empty. Cross-attention compares the ids of decoder tokens with those of encoder tokens.
    if bool(encoder_ids.numel()) != bool(decoder_ids.numel()):
        raise ValueError("give the document ids of both encoder and decoder tokens, or of neither")
    return embedding.word_embeddings(tokens.t()), decoder_tokens, encoder_ids, decoder_ids


def embed_decoder(embedding: WordEmbedding, inputs: Tensors) -> Tensors:
    """Embed decoder tokens: (encoded [k, b, h], tokens [b, q], document ids) -> (hidden [q, b, h], encoded, ids)."""
    encoded, tokens, *documents = inputs
    # The tokens are int32, because they cross all stages of the encoder.
    return embedding.word_embeddings(tokens.long().t()), encoded, *documents


class StackStart(ModelStart):
    """Start of the encoder or the decoder: learned positions, if the model has them, and dropout.

    ids_index: index of the stack's document ids among the inputs. restart_positions: count positions from 0 in each
    document.
    """

    def __init__(self, config: ModelConfig, positions: int, name: str, ids_index: int, restart_positions: bool) -> None:
        super().__init__(config, positions, name)
        self.ids_index = ids_index
        self.restart_positions = restart_positions

    def forward(self, inputs: Tensors, num_cached: int = 0) -> Tensors:
        """Add positions to (hidden [s, b, h], ...), then apply dropout.

        num_cached: number of earlier tokens in incremental decoding.
        """
        hidden, *rest = inputs
        if self.weight is not None:
            total = num_cached + mpu.whole_length(hidden, self.sequence)
            self.check_length(total)
            document_ids = inputs[self.ids_index]
            if self.restart_positions and document_ids.numel():
                positions = positions_in_documents(document_ids).t()  # [s, b]
            else:
                positions = torch.arange(num_cached, total, device=hidden.device).unsqueeze(1)  # [s, 1]
            hidden = hidden + self.look_up_positions(positions)
        return self.dropout(hidden), *rest


def _losses_and_bias(
    optional_inputs: Sequence[Tensor], config: ModelConfig, queries: int, keys: int, causal: bool
) -> tuple[list[Tensor], Tensor | None]:
    """Return the routers' loss (a list with one or no tensor) and the attention's bias, from a block's optional inputs.

    The bias is computed from the table of relative positions. queries, keys: their numbers.
    """
    losses = list(optional_inputs)
    if config.position_embedding != "relative":
        return losses, None
    table = losses.pop()  # the table is the last input; what remains is the loss, if an earlier layer has experts
    return losses, position_bias(table, queries, keys, config, causal)


class EncoderBlock(TransformerLayer):
    """Encoder layer, in which every token attends to all tokens of its document.

    Inputs and outputs are the tensors that ENCODER_TENSORS names: hidden states, decoder tokens and document ids. With
    relative positions, their table is one more input, the last.
    """

    num_stacks = 2

    def __init__(self, config: ModelConfig, name: str) -> None:
        super().__init__(config, name, branches=2 * config.num_layers, causal=False)

    def forward(self, inputs: Tensors) -> Tensors:
        """Run the layer on (hidden [k, b, h], decoder tokens [b, q], encoder ids, decoder ids, loss, table).

        Document ids of the encoder are [b, k], those of the decoder [b, q], or both are empty. The table of relative
        positions is [r, n/t]. The loss [2] is the summed one of the routers, by stack. Both are optional.
        """
        # The further inputs are [], [loss], [table] or [loss, table].
        hidden, tokens, encoder_ids, decoder_ids = inputs[:4]
        s = mpu.whole_length(hidden, self.sequence)  # with sequence parallelism, `hidden` is a shard of the sequence
        losses, bias = _losses_and_bias(inputs[4:], self.config, s, s, causal=False)
        routing = self.make_routing(losses, encoder_ids)
        hidden = self.run_layer(hidden, document_scope(encoder_ids), bias, routing=routing)
        return hidden, tokens, encoder_ids, decoder_ids, *losses  # `run_layer` has added this layer's loss to the list


class DecoderBlock(TransformerLayer):
    """Decoder layer, with causal self-attention and cross-attention, both restricted to the token's own document.

    Inputs and outputs are the tensors that DECODER_TENSORS names: hidden states, encoder output and document ids. With
    relative positions, their table is one more input, the last.
    """

    stack_index = 1
    num_stacks = 2

    def __init__(self, config: ModelConfig, name: str) -> None:
        super().__init__(config, name, branches=3 * config.decoder_layers)

    def build_cross_sublayer(self, config: ModelConfig, name: str, output_std: float) -> None:
        """Build the cross-attention with its norm and its dropout."""
        self.cross_layernorm = build_norm(config)
        self.cross_attention = build_cross_attention(config, name, output_std)
        self.cross_dropout = Dropout(config.hidden_dropout, f"{name}.cross_attention_output")

    def run_cross_sublayer(self, hidden: Tensor, encoded: Encoded, caches: Caches | None) -> Tensor:
        """Add what the tokens attend to in the encoder's output: [q, b, h] -> [q, b, h]."""
        cache = caches.cross_attention if caches else None
        attend = partial(self.cross_attention, encoded=encoded.states, mask=encoded.mask, cache=cache)
        return self.add_branch(self.cross_layernorm, self.cross_dropout, attend, hidden)

    def forward(self, inputs: Tensors, caches: Caches | None = None) -> Tensors:
        """Run the layer on (hidden [q, b, h], encoded [k, b, h], encoder ids, decoder ids, loss, table).

        Document ids of the encoder are [b, k], those of the decoder [b, q], or both are empty. The table of relative
        positions is [r, n/t]. The loss [2] is the summed one of the routers, by stack. Both are optional.
        """
        # The further inputs are [], [loss], [table] or [loss, table].
        hidden, encoded, encoder_ids, decoder_ids = inputs[:4]
        num_cached = caches.self_attention.length if caches else 0
        q = mpu.whole_length(hidden, self.sequence)
        losses, bias = _losses_and_bias(inputs[4:], self.config, q, num_cached + q, causal=True)
        mask = document_scope(decoder_ids, causal=True)
        cross_mask = document_scope(decoder_ids, encoder_ids)
        routing = self.make_routing(losses, decoder_ids)
        hidden = self.run_layer(hidden, mask, bias, Encoded(encoded, cross_mask), caches, routing=routing)
        return hidden, encoded, encoder_ids, decoder_ids, *losses  # with the loss of this layer, as in EncoderBlock


class DecoderNorm(StackNorm):
    """Norm after the decoder. It returns only the hidden states and drops its other inputs."""

    def forward(self, inputs: Tensors) -> Tensors:
        """Normalise: (hidden [q, b, h], encoded, ids of both, optional loss) -> (hidden, optional loss)."""
        return self.norm(inputs[0]), *inputs[len(DECODER_TENSORS) :]


def t5_layers(config: Config, vocab_size: int) -> list[Layer]:
    """Return the layers in order.

    Raises ValueError for settings of another family. Without this check, a run could save a checkpoint that cannot be
    loaded again.
    """
    m = config.model
    if not config.is_t5:
        raise ValueError(f"a T5 cannot be built from settings of family {m.family}: pass --family t5")

    def start(stack: str, outputs: tuple[str, ...]) -> Layer:
        name = f"{stack}.start"
        # Inputs and outputs of a start are the same tensors in the same order.
        ids_index = outputs.index(f"{stack}_document_ids")
        args = m, config.positions, name, ids_index, config.data.reset_position_ids
        return Layer(name, StackStart, args, outputs=outputs)

    def embedding(name: str, call: Any, outputs: tuple[str, ...]) -> Layer:
        return Layer(name, WordEmbedding, (m, vocab_size), tied="embedding", call=call, outputs=outputs)

    encoder_length, decoder_length = sample_lengths(config)
    layers = [
        embedding("embedding", embed_encoder, ENCODER_TENSORS),
        start("encoder", ENCODER_TENSORS),
        *_stack_layers(m, "encoder", EncoderBlock, m.num_layers, ENCODER_TENSORS, encoder_length),
        Layer("encoder.final_norm", StackNorm, (m,), outputs=("encoded", *ENCODER_TENSORS[1:])),
        embedding("decoder.embedding", embed_decoder, DECODER_TENSORS),
        start("decoder", DECODER_TENSORS),
        *_stack_layers(m, "decoder", DecoderBlock, m.decoder_layers, DECODER_TENSORS, decoder_length, encoder_length),
        Layer("decoder.final_norm", DecoderNorm, (m,), outputs=("hidden",)),
        output_layer(config, vocab_size),
    ]
    return with_router_loss(layers)


def _stack_layers(
    m: ModelConfig,
    stack: str,
    block: type[nn.Module],
    count: int,
    outputs: tuple[str, ...],
    tokens: int,
    encoded: int = 0,
) -> Iterator[Layer]:
    """Yield the `count` transformer layers of a stack, with a table of relative positions before each.

    tokens: number of tokens of the stack. encoded: number of encoder tokens to which it cross-attends.
    """
    for i in range(count):
        if m.position_embedding == "relative":
            # Tied tables share one module, so only tables that are not tied have a number in their name.
            table = f"{stack}.relative_positions"
            tied: str | None = f"{stack}_positions"
            if m.relative_attention_per_layer:
                table += f".{i}"
                tied = None
            yield Layer(table, RelativePositions, (m,), tied=tied, outputs=(*outputs, "table"), prelude=True)
        name = f"{stack}.layers.{i}"
        work = block_work(m, tokens, i, encoded)
        routes = m.has_experts(i)
        yield Layer(name, block, (m, name), outputs=outputs, repeated=True, work=work, routes=routes)


class T5Model(LanguageModel):
    """T5 without a pipeline. parallel_output, own, is_text: see LanguageModel."""

    list_layers = staticmethod(t5_layers)

    def forward(
        self,
        encoder_tokens: Tensor,
        decoder_tokens: Tensor,
        encoder_document_ids: Tensor | None = None,
        decoder_document_ids: Tensor | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        **extra: Tensor,
    ) -> Tensor:
        """Return the logits of encoder tokens [b, k] and decoder tokens [b, q], or the loss if labels are given.

        With labels [b, q] the result is the loss of every token, [b, q] in fp32; with a loss_mask [b, q] as well, the
        sum of the losses weighted by it. A loss can be differentiated only once, because its backward pass overwrites
        the logits.
        encoder_document_ids, decoder_document_ids: [b, k] and [b, q], the number of each token's document, 0 for
        padding; tokens attend only within their document. Give both or neither; neither means one document without
        padding. extra: the further tensors `corpora` and `text` of `Targets`.
        """
        if encoder_document_ids is None:
            encoder_document_ids = no_documents(encoder_tokens.device)
        if decoder_document_ids is None:
            decoder_document_ids = no_documents(encoder_tokens.device)
        inputs = encoder_tokens, decoder_tokens, encoder_document_ids, decoder_document_ids
        return self.compute(inputs, labels, loss_mask, extra)
