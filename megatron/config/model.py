"""Sizes and scales of a model that follow from its settings; scales also depend on muP's base model."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from .model_problems import problems_of_heads, problems_of_layers, problems_of_positions
from .model_settings import GATED, ModelSettings
from .optim import floor_share


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelSettings):
    """Settings of the model's layers."""

    def _problems(self) -> Iterator[str]:
        yield from problems_of_heads(self)
        yield from problems_of_positions(self)
        yield from super()._problems()
        yield from problems_of_layers(self)

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
        return floor_share(self.rotary_percent, self.head_size)

    @property
    def has_qkv_bias(self) -> bool:
        """True if the projections to queries, keys and values have biases."""
        return self.hidden_bias if self.qkv_bias is None else self.qkv_bias

    @property
    def is_gated(self) -> bool:
        """True if the MLP is gated: the product of a gate and a value projection."""
        return self.activation in GATED

    @property
    def inner_projections(self) -> int:
        """Number of matrices before the activation function of an MLP: gate and value if it is gated."""
        return 2 if self.is_gated else 1

    @property
    def ff_size(self) -> int:
        """Width of the MLP's inner layer."""
        return self.ff_hidden_size or 4 * self.hidden_size

    @property
    def expert_ff_size(self) -> int:
        """Width of an expert's inner layer."""
        return self.expert_ff_hidden_size or self.ff_size

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
            return self.width_factor  # the keys of the base model have the same ratio to --hidden-size
        base_head_size = self.mup_base_kv_hidden_size or self.head_size
        base_size = self.mup_base_num_key_value_heads * base_head_size
        return self.key_value_heads * self.head_size / base_size

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

        It is that of `init_std`, divided by the square root of the number of branches (Radford et al. 2019). With muP
        for depth, the number is that of the base model.
        growth: see `init_std`. decoder: whether the stack is T5's decoder.
        """
        # factor**2 is the depth of the base model / the depth of this model, so branches * factor**2 are the branches
        # of the base model.
        factor = self.decoder_branch_factor if decoder else self.branch_factor
        divisor = math.sqrt(branches) * factor
        return self.init_std(growth) / divisor

    @property
    def query_factor(self) -> float:
        """Factor of the initial query weights.

        A model that does not divide scores by sqrt(d) multiplies the initial query weights instead (Raffel et al.
        2020).
        """
        if self.scale_attention:
            return 1.0
        return 1 / math.sqrt(self.mup_base_kv_hidden_size or self.head_size)

    @property
    def attention_scale(self) -> float:
        """Factor of the attention scores.

        With muP, it falls as 1/d with the head size d: for a base of 64, heads of 256 have 1/8 * 64/256 = 1/32.
        """
        base = self.mup_base_kv_hidden_size or self.head_size
        base_factor = 1 / math.sqrt(base) if self.scale_attention else 1.0
        return base_factor * (base / self.head_size)

    @property
    def logits_scale(self) -> float:
        """Factor of the hidden states from which logits are computed."""
        base = self.mup_base_hidden_size or self.hidden_size
        base_factor = base**-0.5 if self.scale_tied_logits else 1.0
        return base_factor / self.width_factor
