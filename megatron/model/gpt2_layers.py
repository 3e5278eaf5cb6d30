"""GPT-2 (Radford et al. 2019) as one list of layers; other settings give Llama, Qwen and Mistral.

        tokens, positions -> embedding -> Block x num_layers -> norm -> (tied) logits

GPT-2 adds a learned position vector to each token's embedding. Llama, Qwen and Mistral instead rotate queries and keys
in their blocks (`rotary.py`; Touvron et al. 2023, Jiang et al. 2023).
"""

from megatron.config import Config

from .block import Block
from .embedding import DecoderStart, StackNorm, WordEmbedding
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
    role = document_role_of(config)
    start_name = "start" if m.position_embedding == "rope" else "position_embedding"
    layers = [
        Layer(
            "embedding",
            WordEmbedding,
            (m, vocab_size),
            tied="embedding" if m.tie_embeddings else None,
            outputs=("hidden", "position_ids", "document_ids"),
        ),
        Layer(start_name, DecoderStart, (m, config.positions, start_name, role)),
        *(_block(config, i, role) for i in range(m.num_layers)),
        Layer("final_norm", StackNorm, (m,)),
        output_layer(config, vocab_size),
    ]
    if m.num_experts is None:
        return layers
    from .routing import with_router_loss

    return with_router_loss(layers)


def _block(config: Config, i: int, role: DocumentRole) -> Layer:
    m = config.model
    name = f"layers.{i}"
    work = block_work(m, config.data.seq_length, i)
    has_experts = m.has_experts(i)
    return Layer(name, Block, (m, name, role), repeated=True, work=work, routes=has_experts)


def output_layer(config: Config, vocab_size: int) -> Layer:
    """Return a model's last layer, which computes the logits.

    The layer uses the token embedding's weight, or, with --no-tie-embeddings, a separate weight.
    """
    m = config.model
    encoder_length, decoder_length = sample_lengths(config)
    tied = "embedding" if m.tie_embeddings else None
    work = (decoder_length or encoder_length) * m.hidden_size * vocab_size  # only a T5 has a decoder_length
    call = WordEmbedding.run_output_layer
    return Layer("head", WordEmbedding, (m, vocab_size), tied=tied, call=call, outputs=("logits",), work=work)


def vocab_size_of(config: Config) -> int:
    """Return the vocabulary size of the model. Raises ValueError if it is not set."""
    if config.model.vocab_size is None:
        raise ValueError("the vocabulary size is not known: give --vocab-size or --vocab-file")
    return config.model.vocab_size
