"""Settings of mixtures of experts: layers whose MLP is several experts, of which a router chooses a few per token."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from .fields import Section, at_least, between, flag, more_than, one_of, opt, problems_where


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(Section):
    """Settings of mixtures of experts. `ModelConfig` inherits them, so their section is `model`."""

    num_experts: int | None = opt(
        None,
        "number of experts (MLPs) in a layer, of which a router chooses --experts-per-token for each token; one MLP "
        "for all tokens if not given",
        at_least(1),
    )
    experts_per_token: int = opt(2, "number of experts that each token is sent to; no token is dropped", at_least(1))
    expert_ff_hidden_size: int | None = opt(
        None, "inner width of an expert; --ff-hidden-size if not given", at_least(1)
    )
    mup_base_expert_ff_hidden_size: int | None = opt(
        None,
        "muP: --expert-ff-hidden-size of the base model. If not given, it has the ratio to the size of this model that "
        "--ff-hidden-size has",
        at_least(1),
    )
    num_shared_experts: int = opt(
        0, "number of further experts to which all tokens are sent; they are computed as one wider expert", at_least(0)
    )
    shared_expert_gate: bool = opt(
        False, "multiply the output of the shared experts by a learned gate, a sigmoid, as in Qwen2-MoE"
    )
    moe_layer_frequency: tuple[str, ...] = opt(
        ("1",),
        "which layers have experts: with one number n, layers 0, n, 2n, ...; or one number for each layer of a stack, "
        "1 for experts and 0 for one MLP",
        lambda words: (  # 18 digits fit in int64
            None if words and all(word.isdecimal() and len(word) < 19 for word in words) else "must be numbers"
        ),
    )
    router_score: str = opt(
        "softmax", "function that turns the router's logits into scores", one_of("softmax", "sigmoid")
    )
    normalize_expert_weights: bool = opt(True, "divide the scores of a token's experts by their sum")
    router_balance: str = opt(
        "aux-loss",
        "how the router learns to use all experts equally: by an auxiliary loss (Fedus et al. 2022), by a bias that is "
        "added to the scores for the choice only (Wang et al. 2024), by both, or not at all",
        one_of("aux-loss", "bias", "bias-and-aux-loss", "none"),
    )
    router_aux_loss: float = opt(0.01, "factor of the auxiliary loss of --router-balance", at_least(0), mutable=True)
    router_bias_rate: float = opt(
        0.001, "step by which the bias of --router-balance changes for an expert after each iteration", more_than(0)
    )
    router_z_loss: float = opt(
        0.0, "factor of the z-loss of the router, the squared log-sum-exp of its logits", at_least(0), mutable=True
    )
    router_jitter: float = opt(
        0.0, "in training, multiply each input of the router by a random number within 1 +- this", between(0, 1),
        mutable=True,
    )  # fmt: skip

    def _problems(self) -> Iterator[str]:
        if self.num_experts is None:
            for f in fields(ExpertsConfig):
                value = getattr(self, f.name)
                # Flags of Megatron-LM such as --moe-router-topk imply this value, also in a script without experts.
                is_off = (f.name, value) == ("router_aux_loss", 0.0)
                if value != f.default and not is_off:
                    yield f"{flag(f.name)} needs --num-experts; for one MLP, give only --ff-hidden-size"
            return
        words = self.moe_layer_frequency
        # A frequency such as "2", or a pattern with a number for each layer, such as "1" "0" "1" "1".
        is_pattern = len(words) > 1
        is_bad_pattern = is_pattern and not set(words) <= {"0", "1"}
        is_all_zeros = not "".join(words).strip("0")  # the frequency "0" or a pattern of zeros: no layer has experts
        yield from problems_where(
            (
                self.experts_per_token > self.num_experts,
                f"--experts-per-token {self.experts_per_token} is more than --num-experts {self.num_experts}",
            ),
            (
                self.shared_expert_gate and not self.num_shared_experts,
                "--shared-expert-gate needs --num-shared-experts",
            ),
            (
                is_bad_pattern or is_all_zeros,
                f"--moe-layer-frequency {' '.join(words)} must be one number from 1, or a 0 or 1 for each layer; to "
                "train without experts, leave --num-experts out",
            ),
        )

    @property
    def has_aux_loss(self) -> bool:
        """True if an auxiliary loss balances the router."""
        return self.router_balance in ("aux-loss", "bias-and-aux-loss")

    @property
    def has_router_bias(self) -> bool:
        """True if a bias balances the router."""
        return self.router_balance in ("bias", "bias-and-aux-loss")

    def has_experts(self, layer: int) -> bool:
        """Return whether layer number `layer`, from 0, of a stack has experts instead of one MLP."""
        if self.num_experts is None:
            return False
        words = self.moe_layer_frequency
        if len(words) > 1:  # a 0 or 1 for each layer
            return words[layer] == "1"
        return layer % int(words[0]) == 0  # one number n: layers 0, n, 2n, ...
