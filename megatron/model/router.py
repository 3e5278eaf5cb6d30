"""Router of a mixture of experts: chooses a few experts for each token and weights their outputs.

A router has to use all experts, so it is balanced by an auxiliary loss (Shazeer et al. 2017, Fedus et al. 2022), by a
bias (Wang et al. 2024) or by both. Both look at the share of tokens that each expert had in the whole global batch. A
pipeline begins backward passes before the last forward pass, so both use the shares of the previous step. Thus they do
not depend on the layout. `update_routers` ends a step.

Shapes: s sequence, b batch, h hidden, e experts, k experts of a token, t model-parallel ranks.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron import mpu
from megatron.config import ModelConfig
from megatron.mpu.vocab_shards import reduce_in_place

from .dispatch import count_numbers
from .text_tokens import Text


class RouterOutput(NamedTuple):
    """Result of a router for hidden states [s, b, h].

    experts: numbers of each token's experts [s, b, k]. weights: factors of their outputs [s, b, k]. loss: mean over the
    tokens of auxiliary loss and z-loss, [1]; zero in evaluation.
    """

    experts: Tensor
    weights: Tensor
    loss: Tensor


def _normalize(scores: Tensor) -> Tensor:
    """Return scores [s, b, n] divided by their sum. Sigmoids of a token that no expert suits may all be 0 in fp32."""
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)  # as in DeepSeek-V3


class Router(nn.Module):
    """Linear router. It computes in at least fp32, also under autocast, which `Mixture` disables for it.

    name: name of the mixture in the whole model, for the random stream of --router-jitter.
    tokens: buffer int64 [e], the number of tokens that each expert had in the previous step.
    bias_steps: buffer int64 [e], the bias of each expert divided by --router-bias-rate. Both buffers hold integers,
    because an engine casts floating-point buffers to its precision.
    """

    tokens: Tensor
    bias_steps: Tensor
    step_tokens: Tensor

    def __init__(self, config: ModelConfig, name: str) -> None:
        super().__init__()
        assert config.num_experts
        self.config = config
        self.sequence = mpu.sequence_axis()
        self.stream = mpu.Stream(mpu.get_rng(), f"{name}.jitter", split=self.sequence.size > 1)
        weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.weight = mpu.declare(weight, mpu.normal(config.hidden_std), sequence=self.sequence)
        for buffer_name, persistent in (("tokens", True), ("bias_steps", True), ("step_tokens", False)):
            self.register_buffer(buffer_name, torch.zeros(config.num_experts, dtype=torch.int64), persistent)

    def forward(self, hidden: Tensor, text: Text | None = None) -> RouterOutput:
        """Route hidden states [s, b, h], or with sequence parallelism this rank's shard [s/t, b, h].

        text: which tokens count in the loss and in `tokens`; None for all.
        """
        config = self.config
        x = hidden.to(mpu.wide_dtype(hidden))
        if self.training and config.router_jitter:
            # Multiply each input by a random number between 1 - jitter and 1 + jitter.
            with self.stream.rng.fork(self.stream.name, x.device, self.stream.split):
                x = x * (1 + config.router_jitter * (2 * torch.rand_like(x) - 1))
        logits = F.linear(x, self.weight.to(x.dtype))
        if config.router_score == "softmax":
            scores = logits.softmax(-1)
        else:
            scores = logits.sigmoid()
        choice_scores = scores.detach()  # the bias affects only which experts are chosen, not their weights
        if config.has_router_bias:
            choice_scores = choice_scores + config.router_bias_rate * self.bias_steps
        experts = choice_scores.topk(config.experts_per_token, dim=-1).indices
        weights = scores.gather(-1, experts)
        if config.normalize_expert_weights:
            weights = _normalize(weights)
        if not self.training:
            return RouterOutput(experts, weights, logits.new_zeros(1))  # evaluation neither counts nor balances
        if not self.stream.rng.recomputing:  # the first forward pass has counted these tokens
            self.step_tokens += self._count_tokens(experts, text)
        return RouterOutput(experts, weights, self._balancing_loss(logits, scores, text))

    def _count_tokens(self, experts: Tensor, text: Text | None) -> Tensor:
        """Return int64 [e], the number of text tokens that each expert gets by `experts` [s, b, k]."""
        num_experts = len(self.step_tokens)
        # Padding gets the number `num_experts`, which no expert has and whose count is left out.
        if text is not None:
            experts = experts.masked_fill(~text.mask.unsqueeze(-1), num_experts)
        return count_numbers(experts.flatten(), num_experts + 1)[:num_experts]

    def _balancing_loss(self, logits: Tensor, scores: Tensor, text: Text | None) -> Tensor:
        """Return the mean of auxiliary loss and z-loss over the text tokens of logits and scores [s, b, e], as [1].

        The auxiliary loss of a token is the factor times e times the sum over experts of share x probability. It is
        smallest, equal to the factor, if the shares are equal.
        """
        config = self.config
        token_losses = logits.new_zeros(logits.shape[:-1])  # [s, b]
        if config.has_aux_loss and config.router_aux_loss:
            # Fraction of the previous step's tokens that each expert had, e.g. [0.5, 0.25, 0.25, 0].
            shares = self.tokens / self.tokens.sum().clamp(min=1)
            shares = shares + (shares.sum() == 0) / len(shares)  # before the first step all are 0: make them 1 / e
            probabilities = scores
            if config.router_score != "softmax":  # sigmoids do not sum to 1
                probabilities = _normalize(scores)
            factor = config.router_aux_loss * len(shares)
            token_losses = token_losses + factor * (probabilities @ shares.to(scores.dtype))
        if config.router_z_loss:
            token_losses = token_losses + config.router_z_loss * logits.logsumexp(-1).square()

        # Sum the losses of this rank's shard of the sequence, and divide by the number of tokens in all shards. The
        # sum over the shards is then the mean over all tokens.
        if text is None:
            loss = token_losses.sum().view(1) / (token_losses.numel() * self.sequence.size)
        else:
            text_losses = token_losses.masked_fill(~text.mask, 0.0)
            # Context-parallel ranks divide the total, so it may be below 1. It is 0 if there is only padding.
            loss = text_losses.sum().view(1) / torch.where(text.total == 0, 1.0, text.total)
        if self.sequence.size == 1:
            return loss
        return mpu.reduce_from_model_parallel_region(loss, self.sequence)

    def end_step(self, tokens: Tensor, applied: bool | Tensor = True) -> None:
        """Store `tokens` int64 [e], the tokens of each expert in this step's global batch, and change the biases.

        Nothing changes if the step was skipped.
        """
        # Multiplying by `applied` instead of testing it spares the host from waiting for a tensor.
        self.tokens += (tokens - self.tokens) * applied
        if self.config.has_router_bias and self.weight.requires_grad:  # a frozen router keeps its bias
            # +1 for an expert with fewer tokens than the mean, -1 for one with more, without a division.
            direction = (tokens.sum() - tokens * len(tokens)).sign()
            self.bias_steps += direction * applied
        self.step_tokens.zero_()


@torch.no_grad()
def update_routers(model: nn.Module, applied: bool | Tensor = True) -> None:
    """Give all routers of `model` the number of tokens that each expert had in this step. Call it after each step.

    applied: whether the step changed the weights, as a bool or a tensor []; if not, the routers stay as they are.
    Collective over the ranks that hold the same layers and different tokens.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    if not routers:
        return
    step_tokens = [router.step_tokens for router in routers]
    step_counts = torch.cat(step_tokens)  # of all routers, so that one all-reduce per axis is enough
    # With sequence parallelism, model-parallel ranks also hold different tokens; otherwise `sequence` has size 1.
    for axis in (mpu.get_mesh().data, routers[0].sequence):
        reduce_in_place(step_counts, axis)
    counts = torch.split(step_counts, list(map(len, step_tokens)))
    for router, tokens in zip(routers, counts, strict=True):
        router.end_step(tokens, applied)
