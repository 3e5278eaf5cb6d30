"""Output layer whose logits are computed within the loss, one chunk of tokens at a time.

The method is that of Liger Kernel (Hsu et al. 2024).
The logits of a large vocabulary and their gradient are larger than all other activations. Loss and gradient of a chunk
of tokens depend only on the chunk's logits, except that the loss is later scaled by a factor. So the forward pass turns
each chunk's logits into gradients of hidden states and weight, and frees the logits. The backward pass multiplies these
gradients by the factor.

Shapes: s sequence, b batch, n = s * b tokens, h hidden, v vocabulary, t model-parallel ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..autocast import refuse_second_derivatives
from .cross_entropy import compute_losses, logits_gradient
from .linear import choose_kernels, linear, matmul, needs_grad, start_reduction
from .mesh import Axis, Options
from .sequence import start_all_gather
from .vocab_shards import wide_dtype

# The forward pass computes gradients before the loss is scaled. In fp16, whose smallest number is 6e-8, small gradients
# would become 0. So the forward pass multiplies gradients by this factor, and the backward pass divides by it.
FP16_GRAD_SCALE = 256.0


@dataclass(frozen=True, eq=False)
class DeferredLogits:
    """Inputs of an output layer, for a loss that computes the logits in chunks.

    hidden: [s, b, h], or [s/t, b, h] with sequence parallelism. weight: [v/t, h]. axis, options: the
    output layer's model-parallel ranks and its options.
    chunk: number of tokens whose logits exist at the same time.
    """

    hidden: Tensor
    weight: Tensor
    axis: Axis
    options: Options
    chunk: int

    def in_full(self) -> Tensor:
        """Compute the logits of all tokens, [s, b, v/t]."""
        return linear(self.hidden, self.weight, None, self.axis, self.options)

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (slice of the tokens, logits [c, v/t] of the c tokens in this slice), without gradients."""
        with torch.no_grad():
            yield from _logits_chunks(self, _gather_tokens(self))

    def summed_loss(
        self, target: Tensor, weights: Tensor, vocab_size: int, z_loss: float = 0.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weighted sums of cross entropy and z-loss over all tokens, and the weighted cross entropy [s, b].

        All are in nats and fp32 (fp64 for fp64 hidden states). The first sum has the gradient of both losses. The other
        two tensors have no gradient.
        target: ids [s, b] < vocab_size. weights: [s, b], factors of the tokens' losses, without gradient.
        The matmul runs in autocast's dtype. The backward pass may run once, or once for the hidden states and
        once for the weight. A further backward pass raises RuntimeError.
        """
        total, z_sum, losses = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            self.hidden, self.weight, target.reshape(-1), weights.reshape(-1), vocab_size, z_loss, self
        )
        return total, z_sum, losses.view(target.shape)


def whole_logits(logits: Tensor | DeferredLogits) -> Tensor:
    """Return logits [s, b, v/t], computing them now if they were deferred."""
    return logits.in_full() if isinstance(logits, DeferredLogits) else logits


def _gather_tokens(deferred: DeferredLogits) -> Tensor:
    """Return the hidden states [n, h] of all tokens, gathered from the shards under sequence parallelism."""
    hidden = deferred.hidden
    sequence = deferred.options.sequence_axis(deferred.axis)
    whole = start_all_gather(hidden, sequence).wait() if sequence.size > 1 else hidden
    return whole.reshape(-1, whole.shape[-1])


def _logits_chunks(deferred: DeferredLogits, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield the items of `DeferredLogits.chunks`. hidden: [n, h], see `_gather_tokens`."""
    for begin in range(0, len(hidden), deferred.chunk):
        x = hidden[begin : begin + deferred.chunk]
        second_kernel = choose_kernels(x, deferred.weight, deferred.options).output
        yield slice(begin, begin + len(x)), matmul(x, deferred.weight, None, second_kernel)


def _add_matmul(total: Tensor | None, x: Tensor, weight: Tensor, second_kernel: bool, factor: float = 1.0) -> Tensor:
    """Add factor * (x [m, i] times the transpose of weight [o, i]) to total [m, o] in place, and return total.

    total: None for the first chunk; the result is then a new tensor, in at least fp32. second_kernel: see `matmul`.
    """
    if total is None:
        result = matmul(x, weight, None, second_kernel).to(wide_dtype(x))
        if factor != 1.0:
            result.mul_(factor)
        return result
    # addmm_ adds the product within the matmul, in a single pass over memory. It needs one dtype, but in 16 bits,
    # `total` is in fp32. It is also torch's own kernel, while the second one only returns new tensors.
    if total.dtype == x.dtype and not second_kernel:
        return total.addmm_(x, weight.t(), alpha=factor)
    return total.add_(matmul(x, weight, None, second_kernel), alpha=factor)


class _LinearCrossEntropy(torch.autograd.Function):
    """`DeferredLogits.summed_loss` of hidden [s, b, h], or [s/t, b, h], with target and weights [n]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        weights: Tensor,
        vocab_size: int,
        z_loss: float,
        deferred: DeferredLogits,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = wide_dtype(hidden)
        is_fp16 = hidden.dtype == torch.float16
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        flat_hidden = _gather_tokens(deferred)
        hidden_grad = torch.empty_like(flat_hidden) if needs_hidden else None
        weight_grad = None
        losses = torch.empty_like(target, dtype=dtype)
        z_losses = torch.empty_like(losses)
        grad_scale = FP16_GRAD_SCALE if is_fp16 else 1.0
        for rows, logits in _logits_chunks(deferred, flat_hidden):
            losses[rows], z_losses[rows], state = compute_losses(
                logits, target[rows], vocab_size, deferred.axis, z_loss=z_loss
            )
            # chunk_grad: [c, v/t] for the c tokens of the chunk
            chunk_grad = logits_gradient(logits, state, weights[rows].to(dtype) * grad_scale, overwrite=True)
            x = flat_hidden[rows]
            second_kernel = choose_kernels(x, weight, deferred.options)
            if hidden_grad is not None:
                hidden_grad[rows] = matmul(chunk_grad, weight.t(), None, second_kernel.input_grad)
            if needs_weight:
                divisor = 1.0
                if is_fp16:
                    # A sum over many tokens would overflow fp16; a mean does not. Dividing by a power of 2 is exact, so
                    # the divisor is the number of tokens rounded up to one: 8 for 5 to 8 tokens.
                    divisor = 2.0 ** (len(x) - 1).bit_length()
                    x = x / divisor
                weight_grad = _add_matmul(weight_grad, chunk_grad.t(), x.t(), second_kernel.weight_grad, divisor)
            del logits, chunk_grad  # their memory is free before the logits of the next chunk exist
        ctx.hidden_grad = None if hidden_grad is None else hidden_grad.view(-1, *hidden.shape[1:])
        ctx.weight_grad = weight_grad
        ctx.axis = deferred.axis
        ctx.options = deferred.options
        ctx.grad_scale = grad_scale
        ctx.dtype = weight.dtype
        losses = losses * weights
        z_sum = (z_losses * weights).sum()
        ctx.mark_non_differentiable(z_sum, losses)
        return losses.sum(), z_sum, losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivatives()
        # The forward pass has computed both gradients for a loss of factor 1. They are freed once they are used.
        factor = grad / ctx.grad_scale
        pending_grad = None
        hidden_grad = weight_grad = None  # None is returned for an input whose gradient is not needed
        if needs_grad(ctx, 0):
            unscaled_grad = _require_gradient(ctx.hidden_grad)
            ctx.hidden_grad = None
            scaled_grad = (unscaled_grad.to(factor.dtype) * factor).to(unscaled_grad.dtype)
            del unscaled_grad
            # The sum over the ranks travels while the gradient of the weight is computed, unless overlap is off.
            pending_grad = start_reduction(scaled_grad, ctx.axis, ctx.options.sequence_axis(ctx.axis))
            if not ctx.options.overlap:
                pending_grad.block()
        if needs_grad(ctx, 1):
            weight_grad = _require_gradient(ctx.weight_grad)
            ctx.weight_grad = None
            weight_grad = weight_grad.mul_(factor).to(ctx.dtype)
        if pending_grad is not None:
            hidden_grad = pending_grad.wait()
        return hidden_grad, weight_grad, *[None] * 5  # the other inputs have no gradient


def _require_gradient(gradient: Tensor | None) -> Tensor:
    """Return a gradient that the forward pass has computed. Raises RuntimeError if a backward pass has freed it."""
    if gradient is None:
        raise RuntimeError(
            "logits that are computed in chunks allow only one backward pass; set --logits-chunk-size 0 to run two"
        )
    return gradient
