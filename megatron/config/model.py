"""Settings of the model's layers; the other sections are in `sections.py`."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from . import mup
from .decoder import LLAMA, DecoderConfig
from .fields import at_least, between, each_of, flag, one_of, opt

FAMILIES = ("gpt2", "llama", "t5")
# Position embeddings that each family supports.
POSITIONS = {"gpt2": ("learned",), "llama": ("rope",), "t5": ("learned", "relative")}
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


@dataclass(frozen=True, kw_only=True)
class ModelConfig(DecoderConfig):
    """Settings of the model's layers."""

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
        family=("t5",),
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
        32, "number of distance buckets of relative positions", at_least(4), family=("t5",)
    )
    relative_attention_max_distance: int = opt(
        128,
        "relative positions: distance in tokens from which on all distances share the last bucket",
        at_least(2),
        family=("t5",),
    )
    relative_attention_per_layer: bool = opt(
        False,
        "give each layer its own table of relative positions, as in UMT5, instead of one table for the encoder and one "
        "for the decoder",
        family=("t5",),
    )
    scale_attention: bool = opt(
        True, "divide attention scores by the square root of the head size; the original T5 does not"
    )
    tie_embeddings: bool = opt(True, "use the embedding matrix in the output layer, too")
    scale_tied_logits: bool = opt(
        False,
        "multiply logits by --hidden-size ** -0.5, as the original T5 (2019) does, whose embeddings are tied",
        family=("t5",),
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
        free=True,
    )
    hidden_dropout: float = opt(
        0.1, "dropout on embeddings and on sub-layer outputs before the residual addition", between(0, 1), free=True
    )
    attention_dropout: float = opt(0.1, "dropout on attention weights", between(0, 1), free=True)
    checkpoint_attention: bool = opt(
        False,
        "recompute attention scores in the backward pass (selective recomputation)",
        free=True,
    )
    recompute_modules: tuple[str, ...] = opt(
        (),
        "modules whose outputs are recomputed in the backward pass: norm, qkv (queries, keys and values), activation; "
        "meant for fused attention, which stores no attention scores",
        each_of("norm", "qkv", "activation"),
        free=True,
    )
    offload_activations: bool = opt(
        False,
        "keep activations in host memory instead of accelerator memory between forward and backward pass",
        free=True,
    )
    logits_chunk_size: int = opt(
        0,
        "compute logits and loss of a micro-batch in chunks of this many tokens; 0 computes all tokens at once. "
        "Chunks save memory only if a micro-batch has more tokens than --hidden-size plus this number, because the "
        "forward pass then also computes the gradient of the output matrix and keeps this gradient in fp32. Chunks "
        "slow down wide models. No effect with --reference-ops cross-entropy",
        at_least(0),
        free=True,
    )
    reference_ops: tuple[str, ...] = opt(
        (),
        f"operations to compute by slow reference formulas with torch's autograd, for checks: {', '.join(FUSED)}",
        each_of(*FUSED),
        free=True,
    )
    kernels: str = opt(
        "auto",
        "implementation of norms and Adam: torch or apex; auto uses apex if it is installed",
        one_of("auto", "torch", "apex"),
        free=True,
    )
    layernorm_epsilon: float = opt(1e-5, "epsilon of the norms, layernorm or rmsnorm", between(0, 1))
    init_method_std: float = opt(0.02, "standard deviation of the initial weights", at_least(0), free=True)
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
        family=("t5",),
    )

    def _problems(self) -> Iterator[str]:
        if self.kv_hidden_size is None and self.hidden_size % self.num_attention_heads:
            yield (
                f"--hidden-size {self.hidden_size} cannot be split among --num-attention-heads "
                f"{self.num_attention_heads}; choose a multiple or give --kv-hidden-size"
            )
        if self.num_attention_heads % self.key_value_heads:
            yield (
                f"--num-attention-heads {self.num_attention_heads} must be a multiple of --num-key-value-heads "
                f"{self.key_value_heads}"
            )
        if self.family and self.position_embedding not in POSITIONS[self.family]:
            yield (
                f"--position-embedding {self.position_embedding}: a {self.family} has "
                f"{' or '.join(POSITIONS[self.family])} positions{self._script_for_positions()}"
            )
        if self.position_embedding == "rope" and (self.rotary_size % 2 or not self.rotary_size):
            yield (
                f"rotary positions rotate pairs of dimensions: --rotary-percent {self.rotary_percent:g} of "
                f"--kv-hidden-size {self.head_size} must be an even number of dimensions, not {self.rotary_size}"
            )
        yield from super()._problems()
        stacks = [self.num_layers, self.decoder_layers] if self.family == "t5" else [self.num_layers]
        pattern = self.moe_layer_frequency
        if self.num_experts and len(pattern) > 1 and any(len(pattern) != layers for layers in stacks):
            yield (
                f"--moe-layer-frequency has {len(pattern)} numbers, but a stack has {max(stacks)} layers; give one for "
                "each layer, or one number in all"
            )
        for name in mup.BASE_SIZES:
            if getattr(self, name) is not None and self.mup_base_hidden_size is None:
                yield f"{flag(name)} needs --mup-base-hidden-size, too; {self.hidden_size} leaves the width unscaled"
        if self.relative_attention_per_layer and self.position_embedding != "relative":
            yield f"--relative-attention-per-layer needs relative positions, not {self.position_embedding}"
        exact = self.relative_attention_num_buckets // 2
        if self.position_embedding == "relative" and self.relative_attention_max_distance <= exact:
            yield (
                f"--relative-attention-max-distance {self.relative_attention_max_distance} must be more "
                f"than {exact}: that many of --relative-attention-num-buckets {self.relative_attention_num_buckets} "
                "hold one distance each"
            )

    def _script_for_positions(self) -> str:
        """Return advice for positions that another script supports, else an empty string."""
        if self.position_embedding == "rope":
            return (
                "; use pretrain_llama.py, for a GPT-2 with rotary positions with --normalization layernorm "
                "--activation gelu-tanh --hidden-bias --tie-embeddings --hidden-dropout 0.1 --attention-dropout 0.1"
            )
        return "; use pretrain_gpt2.py" if self.position_embedding == "learned" else ""

    @property
    def decoder_layers(self) -> int:
        """Number of layers in T5's decoder."""
        return self.num_decoder_layers or self.num_layers

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.kv_hidden_size or self.hidden_size // self.num_attention_heads

    @property
    def key_value_heads(self) -> int:
        """Number of key/value heads. If it is below the number of attention heads, attention is grouped-query."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def rotary_size(self) -> int:
        """Number of dimensions of each head that rotary positions rotate."""
        return int(self.head_size * self.rotary_percent)

    @property
    def has_qkv_bias(self) -> bool:
        """True if the projections to queries, keys and values have biases."""
        return self.hidden_bias if self.qkv_bias is None else self.qkv_bias

    @property
    def gated(self) -> bool:
        """True if the MLP is gated: the product of a gate and a value projection."""
        return self.activation in GATED

    @property
    def width_factor(self) -> float:
        """Width of this model divided by the width of muP's base model; 1 without muP."""
        return self.hidden_size / (self.mup_base_hidden_size or self.hidden_size)

    @property
    def branch_factor(self) -> float:
        """Factor of the outputs of attention and MLP before the residual addition; 1 without muP for depth.

        For T5 it is the factor of the encoder.
        """
        return math.sqrt((self.mup_base_num_layers or self.num_layers) / self.num_layers)

    @property
    def decoder_branch_factor(self) -> float:
        """The `branch_factor` of T5's decoder."""
        base = self.mup_base_num_decoder_layers
        return math.sqrt(base / self.decoder_layers) if base else self.branch_factor

    @property
    def ff_growth(self) -> float:
        """Inner width of the MLP divided by the inner width in muP's base model; 1 without muP."""
        return self.ff_size / self.mup_base_ff_hidden_size if self.mup_base_ff_hidden_size else self.width_factor

    @property
    def expert_ff_growth(self) -> float:
        """Inner width of an expert divided by the inner width in muP's base model; 1 without muP."""
        base = self.mup_base_expert_ff_hidden_size
        return self.expert_ff_size / base if base else self.ff_growth

    @property
    def key_value_growth(self) -> float:
        """Width of all keys of a token divided by their width in muP's base model; 1 without muP."""
        if self.mup_base_num_key_value_heads is None:
            return self.width_factor
        base = self.mup_base_num_key_value_heads * (self.mup_base_kv_hidden_size or self.head_size)
        return self.key_value_heads * self.head_size / base

    def init_std(self, growth: float) -> float:
        """Return the standard deviation of the initial values of a matrix in attention or MLP.

        growth: number of inputs of the matrix divided by the number in muP's base model.
        """
        return self.init_method_std / math.sqrt(growth)

    @property
    def hidden_std(self) -> float:
        """Standard deviation of the initial values of matrices that multiply hidden states in attention and MLP."""
        return self.init_std(self.width_factor)

    def output_std(self, branches: int, growth: float, decoder: bool = False) -> float:
        """Return the standard deviation of the initial output projections of a stack with `branches` residual branches.

        It is divided by the square root of the number of branches (Radford et al. 2019), in muP's base model.
        growth: see `init_std`. decoder: whether the stack is T5's decoder.
        """
        factor = self.decoder_branch_factor if decoder else self.branch_factor
        return self.init_std(growth) / (math.sqrt(branches) * factor)

    @property
    def query_factor(self) -> float:
        """Factor of the initial query weights.

        A model that does not divide scores by sqrt(d) multiplies the initial query weights instead (Raffel et al.
        2020).
        """
        return 1.0 if self.scale_attention else 1 / math.sqrt(self.mup_base_kv_hidden_size or self.head_size)

    @property
    def attention_scale(self) -> float:
        """Factor of the attention scores."""
        base = self.mup_base_kv_hidden_size or self.head_size
        return (1 / math.sqrt(base) if self.scale_attention else 1.0) * (base / self.head_size)

    @property
    def logits_scale(self) -> float:
        """Factor of the hidden states from which logits are computed."""
        base = self.mup_base_hidden_size or self.hidden_size
        return (base**-0.5 if self.scale_tied_logits else 1.0) / self.width_factor

    @property
    def ff_size(self) -> int:
        """Width of the MLP's inner layer."""
        return self.ff_hidden_size or 4 * self.hidden_size

    @property
    def expert_ff_size(self) -> int:
        """Width of an expert's inner layer."""
        return self.expert_ff_hidden_size or self.ff_size


def with_family(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings `values`, by name, with `family` added if it is missing.

    Only old settings files lack `family`; the missing family is t5 if the file sets enc_seq_length, else gpt2.
    An objective that older versions stored by mistake is removed, see `without_t5s_objective`.
    """
    return without_t5s_objective({"family": "gpt2" if values.get("enc_seq_length") is None else "t5", **values})


def without_t5s_objective(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings `values` of a file, by name, without the objective `span-corruption` if the family is not t5.

    Older versions stored this default objective of T5 in the settings of all families.
    """
    strange = values.get("family", "t5") != "t5" and values.get("objective") == "span-corruption"
    return {name: value for name, value in values.items() if not (strange and name == "objective")}
