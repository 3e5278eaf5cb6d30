"""Gradients added up over replicas during the backward pass, against a sum after it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron import mpu
from tests.support import on_ranks

from .nccl import nccl


class Model(nn.Module):
    """With a weight that is used twice, one that is never used, and one that only rank 0 uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.never, self.sometimes = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(6))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(torch.tanh(self.first(x)))
        if dist.get_rank() == 0:
            x = x * self.sometimes
        return self.last(x).square().sum()


def _flat_buffers(model: Model) -> dict[nn.Parameter, torch.Tensor]:
    """As of an optimizer that adds gradients up itself: matrices in one flat buffer, the others in another."""
    grad_buffers: dict[nn.Parameter, torch.Tensor] = {}
    for matrices in (True, False):
        group = [p for p in model.parameters() if p.requires_grad and (p.dim() > 1) == matrices]
        flat = torch.zeros(sum(p.numel() for p in group) + 1, dtype=torch.float64)
        grad_buffers |= zip(group, flat[:-1].split([p.numel() for p in group]), strict=True)

    def moves(p: nn.Parameter) -> None:
        assert p.grad is not None
        grad_buffers[p] += p.grad.view(-1)
        p.grad = None

    for p in grad_buffers:
        p.register_post_accumulate_grad_hook(moves)  # type: ignore[no-untyped-call]
    return grad_buffers


def _body(bucket_bytes: int, flat: bool = False) -> int:
    mpu.initialize_model_parallel(1)
    torch.manual_seed(0)
    model = Model().double()
    grad_buffers = _flat_buffers(model) if flat else None
    reducer = mpu.GradReducer(grad_buffers or model.parameters(), mpu.get_mesh().data, bucket_bytes, grad_buffers)
    sent = []
    real = dist.all_reduce
    for _ in range(3):
        model.zero_grad()
        for buffer in (grad_buffers or {}).values():
            buffer.zero_()
        inputs = [torch.randn(4, 6, dtype=torch.float64) + dist.get_rank() for _ in range(3)]
        expected = dict.fromkeys(dict(model.named_parameters()), 0)
        for x in inputs:  # plain autograd, and a sum after it
            found = torch.autograd.grad(model(x), [p for p in model.parameters() if p.requires_grad], allow_unused=True)
            for (name, p), grad in zip(
                [(n, p) for n, p in model.named_parameters() if p.requires_grad], found, strict=True
            ):
                expected[name] = expected[name] + (torch.zeros_like(p) if grad is None else grad)
        for name in expected:
            if name != "frozen":
                real(expected[name])

        def counted(x: torch.Tensor, *args: object, **kwargs: object) -> object:
            sent.append(x.numel())
            return real(x, *args, **kwargs)  # type: ignore[arg-type]

        dist.all_reduce = counted  # type: ignore[assignment]
        before = len(sent)
        for micro, x in enumerate(inputs):
            if micro == 2:
                assert len(sent) == before  # gradients that still accumulate stay here
                reducer.arm()
            model(x).backward()
        reducer.finish()
        dist.all_reduce = real
        for name, p in model.named_parameters():
            if p.requires_grad:
                torch.testing.assert_close(grad_buffers[p].view_as(p) if grad_buffers else p.grad, expected[name])
                assert not grad_buffers or p.grad is None
        assert model.frozen.grad is None
    return len(sent) // 3


def _late(bucket_bytes: int, flat: bool) -> int:
    with nccl("eager"):
        return _body(bucket_bytes, flat)


@pytest.mark.parametrize("flat", [False, True])
def test_sums_that_complete_late(flat: bool) -> None:
    """As on an accelerator: nothing has happened when a call returns, and waiting does not block the program."""
    assert on_ranks(2, _late, 8, flat) == [6, 6]


def test_sums_over_accumulated_gradients() -> None:
    """One bucket, or one for each parameter; missing gradients count as zeros."""
    assert on_ranks(2, _body, 10**6) == [1, 1]
    assert on_ranks(3, _body, 8) == [6, 6, 6]


def test_sums_in_place_where_an_optimizer_accumulates() -> None:
    """A bucket for each flat buffer at least: what does not lie side by side cannot be sent in place."""
    assert on_ranks(2, _body, 10**6, True) == [2, 2]
    assert on_ranks(2, _body, 8, True) == [6, 6]
