"""`split_heads` has the same gradient as views of a fused QKV output, but its backward pass copies elements once."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.model.attention import split_heads

S, B, N, D = 7, 2, 3, 4


class Copied(TorchDispatchMode):
    """A dispatch mode that counts the elements written by copy_, clone, stack and cat."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket in (
            torch.ops.aten.copy_,
            torch.ops.aten.clone,
            torch.ops.aten.stack,
            torch.ops.aten.cat,
        ):
            self.numbers += found.numel()
        return found


def _gradient(parts: tuple[Tensor, ...], fused: Tensor, used: int) -> tuple[Tensor, int]:
    weights = torch.randn(used, B, N, S, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    loss = torch.stack([(part * weight).sum() for part, weight in zip(parts, weights, strict=False)]).sum()
    with Copied() as copied:
        (found,) = torch.autograd.grad(loss, fused)
    return found, copied.numbers


@pytest.mark.parametrize("parts, used", [(3, 3), (2, 2), (3, 1)])
def test_gradients_are_those_of_the_views(parts: int, used: int) -> None:
    fused = torch.randn(S, B, N * parts * D, dtype=torch.float64, requires_grad=True)
    ours = split_heads(fused, D, parts)
    theirs = fused.view(S, B, N, parts, D).permute(3, 1, 2, 0, 4).unbind()
    for mine, its in zip(ours, theirs, strict=True):
        assert mine.shape == (B, N, S, D)
        assert torch.equal(mine, its)
        assert mine.data_ptr() == its.data_ptr()
    found, copies = _gradient(ours, fused, used)
    expected, more = _gradient(theirs, fused, used)
    assert torch.equal(found, expected)
    assert copies <= used * S * B * N * D < more


def test_second_derivatives() -> None:
    inputs = torch.randn(2, 1, 2 * 3 * 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: tuple(part.square() for part in split_heads(x, 2, 3)), inputs)
