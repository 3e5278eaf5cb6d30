"""Mixture of experts (Shazeer et al. 2017): an MLP for each expert, of which a router chooses a few for each token.

Each expert gets a contiguous range of rows, see dispatch.py. No token is dropped, whatever the router chooses. With
expert parallelism, each rank has some of the experts, for the tokens of all ranks of its group.

Shapes: s sequence, b batch, h hidden, n tokens, k experts of a token, e experts, t model-parallel ranks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron import mpu
from megatron.autocast import present_autocast
from megatron.config import ModelConfig
from megatron.fused import Fused

from .block import ParallelMLP
from .dispatch import dispatch_to_experts
from .router import Router
from .text_tokens import Text


class Expert(ParallelMLP):
    """MLP of an expert: computes partial sums, which the mixture sums over the model-parallel ranks for all experts."""

    def __init__(self, config: ModelConfig, output_std: float, width: int) -> None:
        super().__init__(replace(config, ff_hidden_size=width), output_std)
        down = self.dense_4h_to_h
        axis = down.axis
        # forward() adds 1 / num_ranks of the bias on each rank, because the mixture sums the ranks' outputs. So each
        # rank computes a part of the bias's gradient. Declared with `sequence`, these parts are summed.
        self.num_ranks = axis.size
        if down.bias is not None:
            down.bias = mpu.declare(nn.Parameter(torch.zeros(config.hidden_size)), sequence=axis)
        # The mixture communicates for all experts at once, so the layers of an expert must not.
        self.dense_h_to_4h.axis = down.axis = mpu.TRIVIAL_AXIS

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        """Apply the expert: [n, h] -> this rank's partial sums [n, h]."""
        partial_sum, bias = super().forward(hidden)
        return partial_sum if bias is None else partial_sum + bias / self.num_ranks


def can_group_matmuls(rows: Tensor, experts: Sequence[Expert]) -> bool:
    """Return whether one grouped matmul multiplies rows [m, h] by the weights of all experts: in bf16 on CUDA devices.

    Experts with biases, recomputed activations, weights that ZeRO 3 shards or widths that are not multiples of 8, which
    the grouped matmul needs, are applied one after another, as on CPUs.
    """
    if not rows.is_cuda or rows.dtype is not torch.bfloat16 or not hasattr(F, "grouped_mm"):
        return False
    first = experts[0]  # all experts are built alike
    down = first.dense_4h_to_h  # its weight is [h, width of this rank's part of the expert]
    if down.bias is not None or first.recomputes_activation:
        return False
    aligned = all(width % 8 == 0 for width in down.weight.shape)
    return aligned and not mpu.sharded_by_zero(first.dense_h_to_4h.weight)


class _GroupedMatmul(torch.autograd.Function):
    """Product of each expert's rows of [m, i] and the transpose of its weight [o, i]: [m, o].

    The grouped matmul needs a copy of all weights in one tensor. The backward pass makes this copy again, so that no
    layer holds one between its forward and its backward pass.
    ends: int32 [experts], the number of the row after each expert's last one.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, ends, *weights)
        outputs: Tensor = F.grouped_mm(rows, torch.stack(weights).transpose(1, 2), offs=ends)
        return outputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, ends, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        rows_grad = None
        if mpu.needs_grad(ctx, 0):
            rows_grad = F.grouped_mm(grad, torch.stack(weights), offs=ends)  # [m, i]
        # Inputs 0 and 1 of `forward` are rows and ends, so the weights are the inputs from 2 on.
        needs_grad = [mpu.needs_grad(ctx, 2 + expert) for expert in range(len(weights))]
        if not any(needs_grad):
            return rows_grad, None, *[None] * len(weights)
        weights_grad = F.grouped_mm(grad.t(), rows, offs=ends)  # [experts, o, i], also if only some are needed
        if _skips_empty_sums(grad):
            idle = ends.diff(prepend=ends.new_zeros(1)) == 0  # experts without rows
            weights_grad.masked_fill_(idle.view(-1, 1, 1), 0.0)
        return rows_grad, None, *weights_grad.unbind()


def _skips_empty_sums(x: Tensor) -> bool:
    """Return whether the grouped matmul may leave the sum over no rows undefined, as on Blackwell (cutlass#2674)."""
    return x.is_cuda and torch.get_device_module(x.device).get_device_capability(x.device)[0] >= 10


def _grouped_matmul(rows: Tensor, weights: Iterable[Tensor], ends: Tensor) -> Tensor:
    return cast(Tensor, _GroupedMatmul.apply(rows, ends, *weights))  # type: ignore[no-untyped-call]


# These functions compute the matmul of a weighted sum, `weights @ outputs`, and those of its gradients as sums of
# products. Compiled into one kernel, they are faster on CUDA than torch.bmm, which is slow for many tiny matmuls.
def _sum_outputs(weights: Tensor, outputs: Tensor) -> Tensor:
    """Sum outputs [n, k, h] by weights [n, 1, k]: [n, 1, h]. Sums are computed in at least fp32."""
    wide = mpu.wide_dtype(outputs)
    return (weights.mT.to(wide) * outputs).sum(1, keepdim=True).to(outputs.dtype)


def _gradient_of_weights(grad: Tensor, outputs: Tensor) -> Tensor:
    """Return the gradient of the weights [n, 1, k] from grad [n, 1, h] and outputs [n, k, h]."""
    wide = mpu.wide_dtype(outputs)
    return (outputs.to(wide) * grad).sum(-1).unsqueeze(1).to(outputs.dtype)


def _gradient_of_outputs(weights: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of the outputs [n, k, h] from weights [n, 1, k] and grad [n, 1, h]."""
    return weights.mT * grad


# First argument: compiled on CUDA. Second: used elsewhere.
sum_outputs = Fused(_sum_outputs, torch.bmm)
gradient_of_weights = Fused(_gradient_of_weights, lambda grad, outputs: torch.bmm(grad, outputs.mT))
gradient_of_outputs = Fused(_gradient_of_outputs, lambda weights, grad: torch.bmm(weights.mT, grad))


class _WeightedSum(torch.autograd.Function):
    """Sum of the outputs [n, k, h] of each token's experts, weighted by [n, 1, k]: [n, 1, h]."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, outputs: Tensor) -> Tensor:
        ctx.save_for_backward(weights, outputs)
        return sum_outputs(weights, outputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        weights, outputs = ctx.saved_tensors
        return gradient_of_weights(grad, outputs), gradient_of_outputs(weights, grad)


class Mixture(nn.Module):
    """Router, experts, and shared experts, which all tokens use, as the MLP of a transformer layer.

    name: name of the mixture in the whole model.
    """

    def __init__(self, config: ModelConfig, name: str, output_std: float) -> None:
        super().__init__()
        assert config.num_experts
        mesh = mpu.get_mesh()
        self.model_axis = mesh.model
        self.sequence = mpu.sequence_axis()
        self.router = Router(config, f"{name}.router")
        width = config.expert_ff_size
        self.num_experts = config.num_experts

        # For example, of 8 experts on 2 ranks, rank 1 has the experts 4 to 7.
        axis = mesh.expert
        self.expert_axis = axis
        num_local = self.num_experts // axis.size
        first = axis.rank * num_local
        local_experts = range(first, first + num_local)
        self.experts = nn.ModuleDict({str(i): Expert(config, output_std, width) for i in local_experts})
        if axis.size > 1:
            for parameter in self.experts.parameters():  # tds sums their gradients over these ranks only
                parameter.replica_group = mesh.expert_replicas.group  # type: ignore[attr-defined]

        # One wide MLP computes the sum of all shared experts.
        self.shared_expert: Expert | None = None
        if config.num_shared_experts:
            self.shared_expert = Expert(config, output_std, config.num_shared_experts * width)
        self.shared_gate: nn.Parameter | None = None
        if config.shared_expert_gate:
            gate = nn.Parameter(torch.empty(1, config.hidden_size))
            self.shared_gate = mpu.declare(gate, mpu.normal(config.hidden_std), sequence=self.sequence)

    def forward(self, hidden: Tensor, text: Text | None = None) -> tuple[Tensor, None, Tensor]:
        """Apply the mixture: [s, b, h] -> ([s, b, h], no bias, loss of the router [1]); s/t with sequence parallelism.

        In evaluation the loss is zero. text: which tokens the router counts in training, see `Router`.
        """
        # Autocast would round the router's logits. It would also cast the weighted sum, but not its backward pass.
        no_autocast = present_autocast(hidden.device, off=True)
        with no_autocast:
            experts, weights, loss = self.router(hidden, text)
        x = self._gather_tokens(hidden)  # each rank computes a part of every expert, for all tokens
        s, b, h = x.shape
        # Numbers of experts have no gradient to sum over the ranks, so they need no `_gather_tokens`.
        experts = mpu.gather_from_sequence_parallel_region(experts, self.sequence).view(s * b, -1)  # [n, k]
        weights = self._gather_tokens(weights).view(s * b, 1, -1)  # [n, 1, k]
        rows = x.flatten(0, 1)
        outputs = dispatch_to_experts(rows, experts, self.num_experts, self._run_experts, self.expert_axis)
        with no_autocast:
            output: Tensor = _WeightedSum.apply(weights.to(outputs.dtype), outputs)  # type: ignore[no-untyped-call]
        output = output.view(s, b, h)
        if self.shared_expert is not None:
            shared = self.shared_expert(x)
            if self.shared_gate is not None:
                gate = torch.sigmoid(F.linear(hidden, self.shared_gate))  # a factor for each token
                shared = shared * self._gather_tokens(gate)
            output = output + shared
        # Sum the ranks' partial sums; with sequence parallelism, keep this rank's shard [s/t, b, h].
        if self.sequence.size > 1:
            output = mpu.reduce_scatter_to_sequence_parallel_region(output, self.sequence)
        else:
            output = mpu.reduce_from_model_parallel_region(output, self.model_axis)
        return output, None, loss

    def _run_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Apply this rank's experts to their rows [m, h], sorted by expert; counts: int64 [experts], rows of each."""
        experts = cast(list[Expert], list(self.experts.values()))
        if not can_group_matmuls(rows, experts):
            parts = rows.split(counts.tolist())  # type: ignore[no-untyped-call]
            return torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])
        ends = counts.cumsum(0, dtype=torch.int32)  # counts (3, 0, 2) give (3, 3, 5)
        up_weights = [expert.dense_h_to_4h.weight for expert in experts]
        down_weights = [expert.dense_4h_to_h.weight for expert in experts]
        # All experts have the same activation function, which works row by row.
        active = experts[0].activation(_grouped_matmul(rows, up_weights, ends))
        return _grouped_matmul(active, down_weights, ends)

    def _gather_tokens(self, x: Tensor) -> Tensor:
        """Return x [s, b, ...] of all tokens for all model-parallel ranks, whose gradients are summed."""
        if self.sequence.size > 1:
            return mpu.gather_from_sequence_parallel_region(x, self.sequence)
        return mpu.copy_to_model_parallel_region(x, self.model_axis)
