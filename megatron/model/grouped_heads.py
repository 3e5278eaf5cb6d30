"""A fused projection cut into rotated queries and keys, and values, with fewer heads of keys and values than of queries.

The rows of the projection stand group by group: of each head of keys and values first the queries that share it (Ainslie et al. 2023), then
its key, then its value; Megatron-LM has the same order. With as many heads of each these are (query, key, value) of head 0 first, as in GPT-2.
A contiguous cut gives each model-parallel rank whole groups, or, where there are more ranks than groups, a stretch of one:
then the ranks that share a group put it together (`own_queries`), so no weight is on two ranks.

Hugging Face's q_proj, k_proj and v_proj are, of the weight seen as [g, p + 2, d, h]: [:, :p], [:, p] and [:, p + 1].
Shapes: s sequence, b batch, n heads of queries of this rank, g groups of this rank (heads of keys and values), p = n / g queries of a group,
d width of a head.
"""

import math
from typing import Any

import torch
from torch import Tensor

from megatron import mpu

from .rotary import Rotation, rotate, rotate_into


def by_head(fused: Tensor, groups: int, size: int) -> Tensor:
    """[s, b, g (p + 2) d] -> [s, b, g, p + 2, d], the same numbers. groups, size: g and d."""
    return fused.view(*fused.shape[:2], groups, -1, size)


def own_queries(fused: Tensor, size: int, sharers: mpu.Axis) -> Tensor:
    """This rank's stretch of a group, [s, b, (p + 2) d / t], whose t sharers have p queries -> [s, b, (p / t + 2) d], its own queries, the key and the value.

    size: d. On the way back the gradients of key and value are summed over the sharers.
    """
    whole = by_head(mpu.gather_partial_from_model_parallel_region(fused, sharers), 1, size).squeeze(2)
    own = (whole.shape[2] - 2) // sharers.size
    return torch.cat([whole[:, :, own * sharers.rank :][:, :, :own], whole[:, :, -2:]], 2).flatten(2)


def cut_groups(
    fused: Tensor, groups: int, size: int, turn: Rotation | None, plain: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """[s, b, g (p + 2) d] -> queries [b, n, s, d], keys and values [b, g, s, d] each, in one piece of memory.

    groups, size: g and d. turn: of queries and keys. plain: by torch's own operations, which take memory and gradients as they like.
    """
    if plain or torch.compiler.is_compiling():  # a compiler does it in one pass by itself
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
    """[s, b, g, p + 2, d] -> queries [s, b, n, d], keys and values [s, b, g, d]; one recipe stands for all three (`recompute.py`)."""
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
    """Writes each gradient where it belongs, turned back; autograd would stack them and lay the stack out again."""

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
