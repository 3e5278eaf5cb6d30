"""Splitting and rotation of a fused projection for grouped-query attention (Ainslie et al. 2023).

The projection's rows are ordered by group: the queries that share a key-value head, then its key, then its
value, as in Megatron-LM. With as many key-value heads as query heads these are (query, key, value) of head 0
first, as in GPT-2. A contiguous shard holds whole groups, or part of one if there are more ranks than groups.
In that case the ranks that share a group gather it (`own_queries`), so no weight is replicated.

With the weight seen as [g, p + 2, d, h], Hugging Face's q_proj, k_proj and v_proj are [:, :p], [:, p] and
[:, p + 1].
Shapes: s sequence, b batch, n query heads of this rank, g groups (key-value heads) of this rank, p = n / g
queries per group, d width of a head.
"""

import math
from typing import Any

import torch
from torch import Tensor

from megatron import mpu

from .rotary import Rotation, rotate, rotate_into


def by_head(fused: Tensor, groups: int, size: int) -> Tensor:
    """View [s, b, g (p + 2) d] as [s, b, g, p + 2, d]. groups, size: g and d."""
    return fused.view(*fused.shape[:2], groups, -1, size)


def own_queries(fused: Tensor, size: int, sharers: mpu.Axis) -> Tensor:
    """Gather a group over its t sharers, [s, b, (p + 2) d / t] each, and keep this rank's queries, key and value.

    Returns [s, b, (p / t + 2) d]. size: d. The backward pass sums the gradients of key and value over the
    sharers.
    """
    whole = by_head(mpu.gather_partial_from_model_parallel_region(fused, sharers), 1, size).squeeze(2)
    own = (whole.shape[2] - 2) // sharers.size
    return torch.cat([whole[:, :, own * sharers.rank :][:, :, :own], whole[:, :, -2:]], 2).flatten(2)


def cut_groups(
    fused: Tensor, groups: int, size: int, turn: Rotation | None, plain: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Split [s, b, g (p + 2) d] into queries [b, n, s, d] and keys and values, [b, g, s, d] each, in one buffer.

    groups, size: g and d. turn: rotation of queries and keys. plain: use torch's operations, whose results
    need not share a buffer.
    """
    if plain or torch.compiler.is_compiling():  # a compiler does it in one pass
        parts = by_head(fused, groups, size)
        query, key, value = parts[..., :-2, :].flatten(2, 3), parts[..., -2, :], parts[..., -1, :]
        found = rotate(query, turn), rotate(key, turn), value
    elif fused.requires_grad and torch.is_grad_enabled():
        found = _CutGroups.apply(fused, groups, size, turn)  # type: ignore[no-untyped-call]
    else:
        found = _cut(by_head(fused, groups, size), turn)
    query, key, value = (each.permute(1, 2, 0, 3) for each in found)
    return query, key, value


def _cut(parts: Tensor, turn: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
    """Split [s, b, g, p + 2, d] into queries [s, b, n, d] and keys and values [s, b, g, d].

    They share one buffer, so that one recipe can recompute all three (`recompute.py`).
    """
    s, b, g, each, d = parts.shape
    shapes = [(s, b, g, each - 2, d), (s, b, g, 1, d), (s, b, g, 1, d)]
    memory, begins = parts.new_empty(parts.numel()), (0, s * b * g * (each - 2) * d, s * b * g * (each - 1) * d)
    query, key, value = (
        memory.narrow(0, begin, math.prod(shape)).view(shape) for begin, shape in zip(begins, shapes, strict=True)
    )
    rotate_into(query, parts[..., :-2, :], turn)
    rotate_into(key, parts[..., -2:-1, :], turn)
    value.copy_(parts[..., -1:, :])
    return query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3)


class _CutGroups(torch.autograd.Function):
    """Split of a projection whose backward pass writes each gradient, rotated back, to its place.

    Autograd would stack the gradients and then rearrange the stack.
    """

    @staticmethod
    def forward(
        ctx: Any, fused: Tensor, groups: int, size: int, turn: Rotation | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.turn = turn
        ctx.set_materialize_grads(False)
        parts = by_head(fused, groups, size)
        ctx.shape = parts.shape
        return _cut(parts, turn)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:  # type: ignore[override]
        known = next((grad for grad in grads if grad is not None), None)
        if known is None:
            return None, None, None, None
        whole = known.new_empty(ctx.shape)
        groups, each = ctx.shape[2:4]
        for grad, begin, end, turn in zip(grads, (0, -2, -1), (-2, -1, each), (ctx.turn, ctx.turn, None), strict=True):
            place = whole[..., begin:end, :]
            if grad is None:
                place.zero_()
            else:
                rotate_into(place, grad.view(*grad.shape[:2], groups, -1, grad.shape[-1]), turn, back=True)
        return whole.flatten(2), None, None, None
