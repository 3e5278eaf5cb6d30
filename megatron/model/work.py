"""Work of each layer: the number of multiply-adds of its forward pass over one sample.

pipe.py uses these numbers to give all pipeline stages about the same work. Attention matmuls are counted without regard
to masks. Norms, activations and look-ups are not counted.
"""

from megatron.config import Config, ModelConfig


def mlp_work(m: ModelConfig, layer: int) -> int:
    """Return the multiply-adds of layer number `layer` of a stack for one token in its MLP, or in its mixture.

    Those of a mixture are of the router, of a token's experts, of the shared experts and of their gate.
    """
    matrices = m.inner_projections + 1  # one more for the output
    if not m.has_experts(layer):
        return m.hidden_size * m.ff_size * matrices
    width = m.expert_ff_size * (m.experts_per_token + m.num_shared_experts)  # of the experts that a token uses
    # The router has an output for each expert. The gate, if there is one, has one output (True counts as 1).
    router_and_gate = (m.num_experts or 0) + m.shared_expert_gate
    return m.hidden_size * (width * matrices + router_and_gate)


def idle_weights(m: ModelConfig) -> int:
    """Return the number of parameters of a decoder-only model's experts to which a given token is not sent."""
    if m.num_experts is None:
        return 0
    layers_with_experts = sum(map(m.has_experts, range(m.num_layers)))
    idle_experts = m.num_experts - m.experts_per_token
    up_width = m.expert_ff_size * m.inner_projections
    matrices = m.hidden_size * (up_width + m.expert_ff_size)
    biases = (up_width + m.hidden_size) * m.hidden_bias  # 0 without --hidden-bias
    return layers_with_experts * idle_experts * (matrices + biases)


def block_work(m: ModelConfig, tokens: int, layer: int, encoded: int = 0) -> int:
    """Return the multiply-adds of transformer layer number `layer` of a stack over `tokens` tokens.

    encoded: number of encoder tokens to which a decoder layer cross-attends.
    """
    all_heads = m.num_attention_heads * m.head_size
    projection = m.hidden_size * all_heads  # of one token, like mlp and keys_and_values
    mlp = mlp_work(m, layer)
    keys_and_values = 2 * m.hidden_size * m.key_value_heads * m.head_size
    # Queries and output have a projection each. Attention has two matmuls: scores, and probabilities times values.
    work = tokens * (2 * projection + keys_and_values + mlp) + 2 * tokens * tokens * all_heads
    if encoded:
        # Cross-attention projects each token to a query and an output, each encoder token to a key and a value.
        work += 2 * (tokens + encoded) * projection + 2 * tokens * encoded * all_heads
    return work


def sample_lengths(config: Config) -> tuple[int, int]:
    """Return a sample's numbers of tokens: (encoder, decoder) for a T5, else (sequence length, 0).

    Masked spans decide the decoder's length, so it is an estimate. A small --dec-seq-length shortens the encoder, too.
    With the convention `cpm`, all of --dec-seq-length counts: document ends need more spans, and triples are padded.
    """
    data = config.data
    if not config.is_t5:
        return data.seq_length, 0
    encoder = data.enc_seq_length or data.seq_length
    limit = data.dec_seq_length
    if data.objective == "prefix-lm":
        return encoder, limit or max(encoder // 4, 1)
    if limit and data.span_convention == "cpm":
        return encoder, limit
    noise = data.noise_density
    spans = data.noise_density / data.mean_span_length
    # Of each text token, the encoder sees 1 - noise + spans tokens, the decoder noise + spans: a sentinel per span.
    decoder = max(round(encoder * (noise + spans) / (1 - noise + spans)), 1)
    if limit and limit < decoder:
        return encoder * limit // decoder, limit
    return encoder, decoder


def flops_per_token(parameters: int, config: Config, encoder: int, decoder: int = 0) -> float:
    """Return the FLOPs of a training step per token, for samples of `encoder` (+ `decoder`) tokens.

    Each parameter that multiplies a token counts 6 FLOPs (2 forward, 4 backward; Kaplan et al. 2020). The attention
    matmuls count in addition, without savings by the causal mask (Chowdhery et al. 2022). Embedding look-ups count 0.
    GPT-2 and Llama: 6 N + 12 x layers x sequence length x heads x head size. N is the number of parameters without
    position embeddings, without an untied word embedding, and of each mixture with only its router, the experts of a
    token and the shared experts. A tied word embedding counts as the output layer.
    T5: encoder tokens pass through the encoder layers and the key and value projections of cross-attention. Decoder
    tokens pass through all other matmuls.
    """
    m = config.model
    if not decoder:  # a decoder-only model, whose tokens are `encoder`
        inner = m.num_attention_heads * m.head_size
        looked_up = config.positions if m.position_embedding == "learned" else 0
        # An untied word embedding is only looked up. A tied one also computes the logits.
        if not m.tie_embeddings:
            looked_up += m.vocab_size or 0
        multiplied = parameters - looked_up * m.hidden_size - idle_weights(m)
        return 6.0 * multiplied + 12.0 * m.num_layers * inner * encoder
    # T5: multiply-adds of the forward pass over one sample.
    blocks = sum(block_work(m, encoder, i) for i in range(m.num_layers))
    blocks += sum(block_work(m, decoder, i, encoder) for i in range(m.decoder_layers))
    logits = decoder * m.hidden_size * (m.vocab_size or 0)
    return 6.0 * (blocks + logits) / (encoder + decoder)
