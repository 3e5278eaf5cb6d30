"""Work of each layer: the number of multiply-adds of its forward pass over one sample.

pipe.py uses these numbers to give all pipeline stages about the same work. Attention matmuls are counted without regard
to masks. Norms, activations and look-ups are not counted.
"""

from megatron.config import Config, ModelConfig


def block_work(m: ModelConfig, tokens: int, encoded: int = 0) -> int:
    """Return the multiply-adds of a transformer layer over `tokens` tokens.

    encoded: number of encoder tokens to which a decoder layer cross-attends.
    """
    inner = m.num_attention_heads * m.head_size
    projection, mlp = m.hidden_size * inner, m.hidden_size * m.ff_size * (3 if m.gated else 2)
    keys_and_values = 2 * m.hidden_size * m.key_value_heads * m.head_size
    own = tokens * (2 * projection + keys_and_values + mlp) + 2 * tokens * tokens * inner
    cross = 2 * (tokens + encoded) * projection + 2 * tokens * encoded * inner
    return own + (cross if encoded else 0)


def lengths(config: Config) -> tuple[int, int]:
    """Return a sample's numbers of tokens: (encoder, decoder) for a T5, else (sequence length, 0).

    If the objective decides the decoder's length, the number of decoder tokens is an estimate.
    """
    data = config.data
    if not config.is_t5:
        return data.seq_length, 0
    encoder = data.enc_seq_length or data.seq_length
    if data.dec_seq_length:
        return encoder, data.dec_seq_length
    if data.objective == "prefix-lm":
        return encoder, max(encoder // 4, 1)
    noise, spans = data.noise_density, data.noise_density / data.mean_span_length
    return encoder, max(round(encoder * (noise + spans) / (1 - noise + spans)), 1)
