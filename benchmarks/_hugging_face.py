"""Hugging Face's GPT-2, Llama, Mixtral and T5 without dropout, as baselines for this project's models."""

from typing import Any


def gpt2(vocab: int, seq: int, hidden: int, layers: int, heads: int) -> Any:
    """Build a GPT-2; calling it with (tokens [b, s], labels=) returns an object with `loss`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocab, n_positions=seq, n_embd=hidden, n_layer=layers, n_head=heads,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


def t5(vocab: int, hidden: int, ff: int, layers: int, heads: int, kv: int = 64) -> Any:
    """Build a T5; calling it with (tokens [b, s], decoder_input_ids=, labels=) returns an object with `loss`."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=vocab, d_model=hidden, d_kv=kv, d_ff=ff, num_layers=layers, num_heads=heads,
        feed_forward_proj="gated-gelu", dropout_rate=0.0, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return T5ForConditionalGeneration(config).train()


def llama(vocab: int, seq: int, hidden: int, ff: int, layers: int, heads: int, groups: int, tied: bool = True) -> Any:
    """Build a Llama; calling it with (tokens [b, s], labels=) returns an object with `loss`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab, max_position_embeddings=seq, hidden_size=hidden, intermediate_size=ff,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=groups, tie_word_embeddings=tied,
        use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def mixtral(
    vocab: int, seq: int, hidden: int, ff: int, layers: int, heads: int, groups: int, experts: int, each: int
) -> Any:
    """Build a Mixtral with `each` of `experts` experts per token; calling it returns an object with `loss`."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=vocab, max_position_embeddings=seq, hidden_size=hidden, intermediate_size=ff,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=groups, num_local_experts=experts,
        num_experts_per_tok=each, tie_word_embeddings=True, use_cache=False, output_router_logits=True,
    )  # fmt: skip
    return MixtralForCausalLM(config).train()
