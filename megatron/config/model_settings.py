"""Settings of the model's layers; `model.py` has the sizes and scales that follow from them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .decoder import LLAMA, DecoderConfig
from .fields import at_least, between, one_of, opt

FAMILIES = ("gpt2", "llama", "t5")
T5 = ("t5",)
ACTIVATIONS = ("gelu", "gelu-tanh", "relu", "gated-gelu", "swiglu")
GATED = ("gated-gelu", "swiglu")
# Operations with a fused and a reference implementation. Both implementations give the same loss up to rounding.
FUSED = (
    "biased-attention",
    "cross-entropy",
    "document-attention",
    "gated-gelu",
    "relative-positions",
    "rms-norm",
    "rope",
    "swiglu",
)


def all_within(*choices: Any) -> Callable[[Any], str | None]:
    """Return a check that returns None if all words of a value are in `choices`, and an error text otherwise."""
    return lambda values: None if set(values) <= set(choices) else f"may name only {', '.join(map(str, choices))}"


@dataclass(frozen=True, kw_only=True)
class ModelSettings(DecoderConfig):
    """Settings of the model's layers; `ModelConfig` adds the sizes and scales that follow from them."""

    family: str | None = opt(
        None,
        f"model family: {', '.join(FAMILIES[:-1])} or {FAMILIES[-1]}, set by the entry script; none for a custom model",
        one_of(*FAMILIES),
    )
    num_layers: int = opt(12, "number of transformer layers; for T5, of the encoder", at_least(1))
    hidden_size: int = opt(768, "width of the residual stream", at_least(1))
    num_attention_heads: int = opt(12, "number of attention heads", at_least(1))
    kv_hidden_size: int | None = opt(
        None, "width of one attention head; --hidden-size / --num-attention-heads if not given", at_least(1)
    )
    num_decoder_layers: int | None = opt(
        None,
        "number of layers of T5's decoder; --num-layers if not given",
        at_least(1),
        family=T5,
    )
    normalization: str = opt("layernorm", "type of the norms: layernorm or rmsnorm", one_of("layernorm", "rmsnorm"))
    activation: str = opt(
        "gelu-tanh", f"activation function of the MLP: {', '.join(ACTIVATIONS)}", one_of(*ACTIVATIONS)
    )
    position_embedding: str = opt(
        "learned",
        "position embeddings: learned, relative (T5) or rope (rotary positions, Llama)",
        one_of("learned", "relative", "rope"),
    )
    relative_attention_num_buckets: int = opt(
        32, "number of distance buckets of relative positions", at_least(4), family=T5
    )
    relative_attention_max_distance: int = opt(
        128,
        "relative positions: distance in tokens from which on all distances share the last bucket",
        at_least(2),
        family=T5,
    )
    relative_attention_per_layer: bool = opt(
        False,
        "give each layer its own table of relative positions, as in UMT5, instead of one table for the encoder and one "
        "for the decoder",
        family=T5,
    )
    scale_attention: bool = opt(
        True, "divide attention scores by the square root of the head size; the original T5 does not"
    )
    tie_embeddings: bool = opt(True, "use the embedding matrix in the output layer, too")
    scale_tied_logits: bool = opt(
        False,
        "multiply logits by --hidden-size ** -0.5, as the original T5 (2019) does, whose embeddings are tied",
        family=T5,
    )
    ff_hidden_size: int | None = opt(None, "inner width of the MLP; 4 x --hidden-size if not given", at_least(1))
    hidden_bias: bool = opt(True, "biases in the linear layers")
    max_position_embeddings: int | None = opt(
        None, "longest sequence that the model can read, in tokens; --seq-length if not given"
    )
    vocab_size: int | None = opt(
        None, "number of tokens in the vocabulary; taken from the tokenizer if not given", at_least(1)
    )
    make_vocab_size_divisible_by: int = opt(
        128,
        "pad the rows of the embedding table to a multiple of this number times --model-parallel-size",
        at_least(1),
        mutable=True,
    )
    hidden_dropout: float = opt(
        0.1, "dropout on embeddings and on sub-layer outputs before the residual addition", between(0, 1), mutable=True
    )
    attention_dropout: float = opt(0.1, "dropout on attention weights", between(0, 1), mutable=True)
    checkpoint_attention: bool = opt(
        False,
        "recompute attention scores in the backward pass (selective recomputation)",
        mutable=True,
    )
    recompute_modules: tuple[str, ...] = opt(
        (),
        "modules whose outputs are recomputed in the backward pass: norm, qkv (queries, keys and values), activation; "
        "meant for fused attention, which stores no attention scores",
        all_within("norm", "qkv", "activation"),
        mutable=True,
    )
    offload_activations: bool = opt(
        False,
        "keep activations in host memory instead of accelerator memory between forward and backward pass",
        mutable=True,
    )
    logits_chunk_size: int = opt(
        0,
        "compute logits and loss of a micro-batch in chunks of this many tokens; 0 computes all tokens at once. "
        "Chunks save memory only if a micro-batch has more tokens than --hidden-size plus this number, because the "
        "forward pass then also computes the gradient of the output matrix and keeps this gradient in fp32. Chunks "
        "slow down wide models. No effect with --reference-ops cross-entropy",
        at_least(0),
        mutable=True,
    )
    reference_ops: tuple[str, ...] = opt(
        (),
        f"operations to compute by slow reference formulas with torch's autograd, for checks: {', '.join(FUSED)}",
        all_within(*FUSED),
        mutable=True,
    )
    kernels: str = opt(
        "auto",
        "implementation of norms and Adam: torch or apex; auto uses apex if it is installed",
        one_of("auto", "torch", "apex"),
        mutable=True,
    )
    layernorm_epsilon: float = opt(1e-5, "epsilon of the norms, layernorm or rmsnorm", between(0, 1))
    init_method_std: float = opt(0.02, "standard deviation of the initial weights", at_least(0), mutable=True)
    mup_base_hidden_size: int | None = opt(
        None,
        "muP (Yang et al. 2022): --hidden-size of the base model, whose best learning rate then fits models of other "
        "widths. Initial weights, learning rates and logits are scaled; a model of this width is unchanged",
        at_least(1),
    )
    mup_base_kv_hidden_size: int | None = opt(
        None,
        "muP: width of an attention head in the base model. Attention scores are divided by the width instead of its "
        "square root. If not given, that of this model: wider models have more heads",
        at_least(1),
    )
    mup_base_ff_hidden_size: int | None = opt(
        None,
        "muP: --ff-hidden-size of the base model. If not given, its ratio to --hidden-size is that of this model",
        at_least(1),
    )
    mup_base_num_key_value_heads: int | None = opt(
        None,
        "muP with --optimizer muon: --num-key-value-heads of the base model. If not given, their width in total has "
        "the ratio to --hidden-size that it has in this model",
        at_least(1),
        family=LLAMA,
    )
    mup_base_num_layers: int | None = opt(
        None,
        "muP for depth (Yang et al. 2023): --num-layers of the base model. Outputs of attention and MLP, and the "
        "learning rates of their weights, are multiplied by sqrt(base / --num-layers)",
        at_least(1),
    )
    mup_base_num_decoder_layers: int | None = opt(
        None,
        "muP for depth: --num-decoder-layers of the base model. If not given, its ratio to --num-layers is that of "
        "this model",
        at_least(1),
        family=T5,
    )
