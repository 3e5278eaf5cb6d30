"""Splitting and rotation of a fused projection for grouped-query attention (Ainslie et al. 2023).

The projection's rows are ordered by group: the queries that share a key-value head, then its key, then its
value, as in Megatron-LM. With as many key-value heads as query heads, the rows are query, key and value of head 0, then
query, key and value of head 1, and so on. A contiguous shard holds whole groups, or part of a group if there are more
ranks than groups. In the latter case the ranks that share a group gather the group's projections
(`gather_shared_group`), so no weight is replicated.

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
Parts = tuple[int, ...]  # number of heads of each part in a group


def view_by_group(fused: Tensor, groups: int, size: int) -> Tensor:
    """View `fused` [s, b, g * (p + 2) * d] as [s, b, g, p + 2, d], with p queries per group. groups: g. size: d."""
    return fused.view(*fused.shape[:2], groups, -1, size)


def gather_shared_group(fused: Tensor, size: int, sharing_ranks: mpu.Axis) -> Tensor:
    """Gather a group's projections from the t ranks that share it; keep this rank's queries, the key and the value.

    fused: [s, b, (p + 2) * d / t], with p queries per group. size: d, the width of a head. Returns
    [s, b, (p / t + 2) * d]. The backward pass sums the gradients of key and value over the t ranks.
    """
    gathered = mpu.gather_partial_from_model_parallel_region(fused, sharing_ranks)
    group_heads = view_by_group(gathered, 1, size).squeeze(2)  # [s, b, p + 2, d]
    queries_per_rank = (group_heads.shape[2] - 2) // sharing_ranks.size
    queries = group_heads.narrow(2, queries_per_rank * sharing_ranks.rank, queries_per_rank)
    key_and_value = group_heads[:, :, -2:]
    return torch.cat([queries, key_and_value], 2).flatten(2)


def split_grouped_heads(
    fused: Tensor,
    groups: int,
    size: int,
    parts: Parts,
    angles: Rotation | None,
    unfused: bool,
) -> tuple[Tensor, ...]:
    """Split `fused` [s, b, g * sum(parts) * d] into one tensor [b, g * part, s, d] for each part, in one buffer.

    As they share a buffer, one recipe can recompute all of them (`recompute.py`).

    groups: g. size: d, the width of a head. parts: number of heads of each part in a group, (p, 1, 1) for p queries,
    a key and a value.
    angles: rotary position embedding of the first two parts.
    unfused: use torch's own operations instead of `_SplitGrouped`; the results then need not share a buffer.
    """
    # torch.compile fuses torch's own operations itself. --reference-ops rope asks for them by `unfused`.
    if unfused or torch.compiler.is_compiling():
        views = _part_views(view_by_group(fused, groups, size), parts)
        rotated = []
        for part, part_angles in zip(views, _angles_by_part(angles), strict=True):
            rotated.append(rotate(part.flatten(2, 3), part_angles))
        split_parts = tuple(rotated)
    elif not torch.is_grad_enabled():  # no backward pass, so the forward pass of `_SplitGrouped` is enough
        split_parts = _split_parts(view_by_group(fused, groups, size), parts, angles)
    else:
        split_parts = _SplitGrouped.apply(fused, groups, size, parts, angles)  # type: ignore[no-untyped-call]
    return tuple(part.permute(1, 2, 0, 3) for part in split_parts)  # [s, b, g * part, d] -> [b, g * part, s, d]


def _split_parts(by_group: Tensor, parts: Parts, angles: Rotation | None) -> tuple[Tensor, ...]:
    """Split [s, b, g, sum(parts), d] into one tensor [s, b, g * part, d] for each part."""
    rotate_parts = _FUSED_ROTATE if angles is not None else _rotate_parts_eagerly  # mere copies need no compiler
    buffer = rotate_parts(by_group, parts, angles)
    part_buffers = _part_buffers(buffer, list(_part_views(by_group, parts)))
    return tuple(part.flatten(2, 3) for part in part_buffers)


def _part_buffers(buffer: Tensor, views: list[Tensor]) -> Iterator[Tensor]:
    """Cut `buffer` [s * b * g * sum(parts) * d] into one tensor for each part, of its shape [s, b, g, part, d].

    On CPUs, the tokens of a head are adjacent. If they were a large power of two apart, they would compete for the same
    few lines of the cache, and attention would take a fifth longer.
    """
    sizes = list(map(Tensor.numel, views))
    for part_buffer, part in zip(torch.split(buffer, sizes), views, strict=True):
        s, b, groups, heads, d = part.shape
        if buffer.device.type == "cpu":
            # In memory, the tokens of a head are adjacent: [b, g, part, s, d]. The view has the order of `part`.
            part_buffer = part_buffer.view(b, groups, heads, s, d).permute(3, 0, 1, 2, 4)
        yield part_buffer.view(part.shape)


def _part_views(by_group: Tensor, parts: Parts) -> Iterator[Tensor]:
    """Yield a view [s, b, g, part, d] of each part.

    The backward pass writes into the views in place. Autograd permits this for a newly created view, so each view is
    created only when it is requested.
    """
    # For example, the parts (4, 1, 1) end at the heads 4, 5 and 6 of a group, and begin at 0, 4 and 5.
    for part, end in zip(parts, accumulate(parts), strict=True):
        begin = end - part
        yield by_group.narrow(3, begin, part)


def _angles_by_part(angles: Rotation | None) -> tuple[Rotation | None, ...]:
    """Return the rotations of queries, keys and values, of which values never rotate. None: no rotation."""
    return angles, angles, None


def _rotate_parts(by_group: Tensor, parts: Parts, angles: Rotation | None) -> Tensor:
    """Rotate the parts of [s, b, g, sum(parts), d] and write them one after another -> [s * b * g * sum(parts) * d]."""
    views_and_angles = zip(_part_views(by_group, parts), _angles_by_part(angles), strict=True)
    return torch.cat([rotate(part, part_angles).flatten() for part, part_angles in views_and_angles])


def _rotate_parts_eagerly(by_group: Tensor, parts: Parts, angles: Rotation | None) -> Tensor:
    """Do what `_rotate_parts` does, writing each rotated part straight into its place in the buffer."""
    views = list(_part_views(by_group, parts))
    buffer = by_group.new_empty(by_group.numel())
    rotations = _angles_by_part(angles)
    for part_buffer, part, rotation in zip(_part_buffers(buffer, views), views, rotations, strict=True):
        rotate_into(part_buffer, part, rotation)
    return buffer


def _join_grads(any_grad: Tensor, grads: Grads, shape: torch.Size, parts: Parts, angles: Rotation | None) -> Tensor:
    """Rotate the gradients of all parts back and join them to one of `shape`, [s, b, g, sum(parts), d].

    any_grad: any of the gradients that is not None.
    """
    grads_back = []
    for grad, part, rotation in zip(grads, parts, _angles_by_part(angles), strict=True):
        part_shape = (*shape[:3], part, shape[4])  # [s, b, g, part, d]
        if grad is None:
            grads_back.append(any_grad.new_zeros(part_shape))
        else:
            grads_back.append(rotate(grad.view(part_shape), rotation, inverse=True))
    return torch.cat(grads_back, 3)


def _join_grads_eagerly(
    any_grad: Tensor, grads: Grads, shape: torch.Size, parts: Parts, angles: Rotation | None
) -> Tensor:
    """Do what `_join_grads` does, writing each part's gradient straight into its place in the result.

    `_part_views` yields these places, and `_angles_by_part` the rotation of each part.
    """
    joined = any_grad.new_empty(shape)
    rotations = _angles_by_part(angles)
    for grad, part_view, rotation in zip(grads, _part_views(joined, parts), rotations, strict=True):
        if grad is None:
            part_view.zero_()
        else:
            rotate_into(part_view, grad.view(part_view.shape), rotation, inverse=True)
    return joined


_FUSED_ROTATE = Fused(_rotate_parts, _rotate_parts_eagerly)
_FUSED_JOIN = Fused(_join_grads, _join_grads_eagerly)


class _SplitGrouped(torch.autograd.Function):
    """Split of a fused projection into parts.

    The backward pass rotates each part's gradient back and writes it straight into the gradient of the projection.

    torch's own operations would stack the gradients and then rearrange the stack, which copies each gradient twice.
    """

    @staticmethod
    def forward(
        ctx: Any, fused: Tensor, groups: int, size: int, parts: Parts, angles: Rotation | None
    ) -> tuple[Tensor, ...]:
        ctx.parts = parts
        ctx.angles = angles
        ctx.set_materialize_grads(False)  # a part without a gradient has None in backward(), not zeros
        by_group = view_by_group(fused, groups, size)
        ctx.shape = by_group.shape
        return _split_parts(by_group, parts, angles)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # It gives dtype and device to the zeros of a part without a gradient. None: no part has a gradient.
        any_grad = next((grad for grad in grads if grad is not None), None)
        if any_grad is None:
            return (None,) * 5  # one for each input of `forward`
        join_grads = _FUSED_JOIN if ctx.angles is not None else _join_grads_eagerly
        # Only the first input, `fused`, has a gradient.
        return join_grads(any_grad, grads, ctx.shape, ctx.parts, ctx.angles).flatten(2), *[None] * 4
