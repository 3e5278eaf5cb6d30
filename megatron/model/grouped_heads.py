"""Splitting and rotation of a fused projection for grouped-query attention (Ainslie et al. 2023).

The projection's rows are ordered by group: the queries that share a key-value head, then its key, then its
value, as in Megatron-LM. With as many key-value heads as query heads, the rows are query, key and value of head 0, then
query, key and value of head 1, and so on. A contiguous shard holds whole groups, or part of a group if there are more
ranks than groups. In the latter case the ranks that share a group gather the group's projections (`own_queries`), so no
weight is replicated.

With the weight viewed as [g, p + 2, d, h], Hugging Face's q_proj is [:, :p], its k_proj is [:, p] and its v_proj is
[:, p + 1].
Shapes: s sequence, b batch, n query heads of this rank, g groups (key-value heads) of this rank, p = n / g
queries per group, d width of a head.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron import mpu
from megatron.fused import Fused

from .rotary import Rotation, rotate, rotate_into

Grads = tuple[Tensor | None, ...]  # gradients of the parts [s, b, g * part, d]; None for a part without a gradient


def by_head(fused: Tensor, groups: int, size: int) -> Tensor:
    """View `fused` [s, b, g * (p + 2) * d] as [s, b, g, p + 2, d], with p queries per group. groups: g. size: d."""
    return fused.view(*fused.shape[:2], groups, -1, size)


def own_queries(fused: Tensor, size: int, sharers: mpu.Axis) -> Tensor:
    """Gather a group's projections from the t ranks that share it; keep this rank's queries, the key and the value.

    fused: [s, b, (p + 2) * d / t], with p queries per group. size: d, the width of a head. Returns
    [s, b, (p / t + 2) * d]. The backward pass sums the gradients of key and value over the t ranks.
    """
    gathered = mpu.gather_partial_from_model_parallel_region(fused, sharers)
    whole = by_head(gathered, 1, size).squeeze(2)  # [s, b, p + 2, d]
    own = (whole.shape[2] - 2) // sharers.size
    queries = whole.narrow(2, own * sharers.rank, own)
    key_and_value = whole[:, :, -2:]
    return torch.cat([queries, key_and_value], 2).flatten(2)


def split_heads(
    fused: Tensor,
    groups: int,
    size: int,
    parts: tuple[int, ...],
    angles: Rotation | None = None,
    *,
    plain: bool = False,
) -> tuple[Tensor, ...]:
    """Split `fused` [s, b, g * sum(parts) * d] into one tensor [b, g * part, s, d] for each part, in one buffer.

    As they share a buffer, one recipe can recompute all of them (`recompute.py`).

    groups: g. size: d, the width of a head. parts: number of heads of each part in a group, (p, 1, 1) for p queries,
    a key and a value.
    angles: rotary position embedding of the first two parts.
    plain: use torch's own operations instead of `_Split`; the results then need not share a buffer.
    """
    if plain or torch.compiler.is_compiling():  # torch.compile fuses these operations
        cut = [part.flatten(2, 3) for part in _cut(by_head(fused, groups, size), parts)]
        turns = _angles_of(parts, angles)
        found = tuple(rotate(part, turn) for part, turn in zip(cut, turns, strict=True))
    elif not torch.is_grad_enabled():
        found = _split(by_head(fused, groups, size), parts, angles)
    else:
        found = _Split.apply(fused, groups, size, parts, angles)  # type: ignore[no-untyped-call]
    return tuple(part.permute(1, 2, 0, 3) for part in found)


def _split(by_group: Tensor, parts: tuple[int, ...], angles: Rotation | None) -> tuple[Tensor, ...]:
    """Split [s, b, g, sum(parts), d] into one tensor [s, b, g * part, d] for each part."""
    rotated = _ROTATED_PARTS if angles is not None else _rotated_parts_eagerly  # copies need no compiler
    memory = rotated(by_group, parts, angles)
    places = _places(memory, list(_cut(by_group, parts)))
    return tuple(part.flatten(2, 3) for part in places)


def _places(memory: Tensor, cut: list[Tensor]) -> list[Tensor]:
    """Cut `memory` [s * b * g * sum(parts) * d] into one tensor for each part, of its shape [s, b, g, part, d].

    On CPUs, the tokens of a head are adjacent. If they were a large power of two apart, they would compete for the same
    few lines of the cache, and attention would take a fifth longer.
    """
    found = []
    for piece, part in zip(torch.split(memory, [part.numel() for part in cut]), cut, strict=True):
        s, *middle, d = part.shape
        if memory.device.type == "cpu":
            piece = piece.view(*middle, s, d).permute(3, 0, 1, 2, 4)
        found.append(piece.view(part.shape))
    return found


def _cut(by_group: Tensor, parts: tuple[int, ...]) -> Iterator[Tensor]:
    """Yield a view [s, b, g, part, d] of each part.

    The backward pass writes into the views in place. Autograd permits this for a newly created view, so each view is
    created only when it is requested.
    """
    for part, end in zip(parts, accumulate(parts), strict=True):
        yield by_group.narrow(3, end - part, part)


def _angles_of(parts: tuple[int, ...], angles: Rotation | None) -> tuple[Rotation | None, ...]:
    return (angles, angles, None)[: len(parts)]


def _rotated_parts(by_group: Tensor, parts: tuple[int, ...], angles: Rotation | None) -> Tensor:
    """Rotate the parts of [s, b, g, sum(parts), d] and write them one after another -> [s * b * g * sum(parts) * d]."""
    turned = zip(_cut(by_group, parts), _angles_of(parts, angles), strict=True)
    return torch.cat([rotate(part, turn).flatten() for part, turn in turned])


def _rotated_parts_eagerly(by_group: Tensor, parts: tuple[int, ...], angles: Rotation | None) -> Tensor:
    cut = list(_cut(by_group, parts))
    memory = by_group.new_empty(by_group.numel())
    for place, part, turn in zip(_places(memory, cut), cut, _angles_of(parts, angles), strict=True):
        rotate_into(place, part, turn)
    return memory


def _joined(known: Tensor, grads: Grads, shape: torch.Size, parts: tuple[int, ...], angles: Rotation | None) -> Tensor:
    """Rotate the gradients of all parts back and join them to one of `shape`, [s, b, g, sum(parts), d].

    known: any of the gradients that is not None.
    """
    found = []
    for grad, part, turn in zip(grads, parts, _angles_of(parts, angles), strict=True):
        size = (*shape[:3], part, shape[4])
        found.append(known.new_zeros(size) if grad is None else rotate(grad.view(size), turn, back=True))
    return torch.cat(found, 3)


def _joined_eagerly(
    known: Tensor, grads: Grads, shape: torch.Size, parts: tuple[int, ...], angles: Rotation | None
) -> Tensor:
    whole = known.new_empty(shape)
    for grad, place, turn in zip(grads, _cut(whole, parts), _angles_of(parts, angles), strict=True):
        if grad is None:
            place.zero_()
        else:
            rotate_into(place, grad.view(place.shape), turn, back=True)
    return whole


_ROTATED_PARTS = Fused(_rotated_parts, _rotated_parts_eagerly)
_JOINED = Fused(_joined, _joined_eagerly)


class _Split(torch.autograd.Function):
    """Split of a fused projection into parts.

    The backward pass rotates each part's gradient back and writes it straight into the gradient of the projection.

    torch's own operations would stack the gradients and then rearrange the stack, which copies each gradient twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        fused: Tensor,
        groups: int,
        size: int,
        parts: tuple[int, ...],
        angles: Rotation | None,
    ) -> tuple[Tensor, ...]:
        ctx.parts = parts
        ctx.angles = angles
        ctx.set_materialize_grads(False)
        by_group = by_head(fused, groups, size)
        ctx.shape = by_group.shape
        return _split(by_group, parts, angles)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        known = next((grad for grad in grads if grad is not None), None)
        if known is None:
            return (None,) * 5
        joined = _JOINED if ctx.angles is not None else _joined_eagerly
        return joined(known, grads, ctx.shape, ctx.parts, ctx.angles).flatten(2), *[None] * 4
