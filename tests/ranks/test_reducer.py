"""Gradients that are all-reduced over replicas during the backward pass equal those all-reduced after it."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tds.reducer import GradReducer
from tests.support import on_ranks

from .nccl import nccl


class Model(nn.Module):
    """A model whose weights are of four kinds: used twice, never used, used only on rank 0, and frozen."""

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


def expected_sums(model: Model, inputs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weight name -> gradient, summed over `inputs` by plain autograd and then over ranks by an all-reduce."""
    learns = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros_like(p) for name, p in learns.items()}
    for x in inputs:
        found = torch.autograd.grad(model(x), list(learns.values()), allow_unused=True)
        for name, grad in zip(learns, found, strict=True):
            sums[name] += 0 if grad is None else grad
    for each in sums.values():
        dist.all_reduce(each)
    return sums


def _body(bucket_bytes: int) -> tuple[int, list[int]]:
    torch.manual_seed(0)
    model = Model().double()
    reducer = GradReducer(model, dist.group.WORLD, bucket_bytes)
    sent: list[int] = []
    real, during = dist.all_reduce, []

    def counted(x: torch.Tensor, *args: object, **kwargs: object) -> object:
        sent.append(x.numel())
        return real(x, *args, **kwargs)  # type: ignore[arg-type]

    for _ in range(3):
        model.zero_grad()
        inputs = [torch.randn(4, 6, dtype=torch.float64) + dist.get_rank() for _ in range(3)]
        expected = expected_sums(model, inputs)
        dist.all_reduce = counted  # type: ignore[assignment]
        before = len(sent)
        for micro, x in enumerate(inputs):
            if micro == 2:
                assert len(sent) == before  # only the last micro-batch starts all-reduces
                reducer.arm()
            model(x).backward()
        during.append(len(sent) - before)
        reducer.finish()
        dist.all_reduce = real
        for name, p in model.named_parameters():
            if name in ("never", "frozen"):
                assert p.grad is None
            else:
                torch.testing.assert_close(p.grad, expected[name])
    return len(sent) // 3, during


def _late(bucket_bytes: int) -> tuple[int, list[int]]:
    with nccl("eager"):
        return _body(bucket_bytes)


def test_sums_that_complete_late() -> None:
    """Gradients are right even if all-reduces complete long after their call, as on an accelerator."""
    assert on_ranks(2, _late, 8) == [(6, [0, 5, 5]), (6, [0, 4, 4])]  # rank 1 does not use the weight `sometimes`


def test_sums_over_accumulated_gradients() -> None:
    """From step 1 on, small buckets are all-reduced during the backward pass; a single bucket is reduced after it."""
    assert on_ranks(2, _body, 10**6) == [(1, [0, 0, 0])] * 2
    assert on_ranks(3, _body, 8) == [(6, [0, 5, 5]), (6, [0, 4, 4]), (6, [0, 4, 4])]


def _used_once_more() -> str:
    weight = nn.Parameter(torch.ones(2))
    reducer = GradReducer(nn.ParameterList([weight]), dist.group.WORLD)
    for uses in (1, 1, 2):
        reducer.arm()
        try:
            for _ in range(uses):
                (weight * 2).sum().backward()
        except RuntimeError as error:
            return str(error)
        reducer.finish()
        weight.grad = None
    return "nothing"


def test_a_gradient_that_comes_after_its_sum_has_left_is_an_error() -> None:
    for told in on_ranks(2, _used_once_more):
        assert told.startswith("a gradient of a weight of shape (2,) arrived after its bucket was reduced")
        assert "overlap_grad_reduce" in told and "--" not in told


def _freed_later() -> list[bool]:
    first, later = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    reducer, right = GradReducer(nn.ParameterList([first, later]), dist.group.WORLD), []
    for step in range(4):
        later.requires_grad_(step >= 2)
        first.grad = later.grad = None
        reducer.arm()
        ((first + later) * (dist.get_rank() + 1.0)).sum().backward()
        reducer.finish()
        grads = [first.grad, later.grad] if step >= 2 else [first.grad]
        right.append(all(grad is not None and grad.tolist() == [3.0, 3.0] for grad in grads))
    return right


def test_a_weight_that_begins_to_learn_is_added_up_too() -> None:
    assert on_ranks(2, _freed_later) == [[True] * 4] * 2


class Experts(nn.Module):
    """A top-1 mixture of two experts in plain torch; `mixture` is DeepSpeed's, of which this rank holds one expert."""

    def __init__(self) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.experts = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        own = self.experts[dist.get_rank()]
        self.mixture: Any = MoE(6, own, 2, ep_size=2, capacity_factor=2.0, min_capacity=0, use_rts=False)
        self.gate = copy.deepcopy(self.mixture.deepspeed_moe.gate.wg)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares, chosen = self.gate(x).softmax(-1).max(-1, keepdim=True)
        outputs = torch.stack([expert(x) for expert in self.experts])
        return shares * torch.where(chosen == 0, outputs[0], outputs[1])


ROUTES: dict[str, dict[str, Any]] = {
    "during the backward pass": {},
    "after the backward pass": {"pipeline": {"overlap_grad_reduce": False}},
    "DistributedOptimizer": {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True},
}


def _deepspeed_experts(route: str) -> None:
    import tds

    torch.manual_seed(0)
    plain = Experts()
    pipe = tds.PipelineModule([plain.mixture, lambda outputs: outputs[0]], num_stages=1, loss_fn=nn.MSELoss())
    inner = torch.optim.SGD(pipe.parameters(), lr=0.5)
    config = {"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 0.05, **ROUTES[route]}
    optimizer = tds.DistributedOptimizer(inner) if "zero_optimization" in config else inner
    engine = tds.initialize(model=pipe, optimizer=optimizer, config=config)[0]
    weights = [*plain.experts.parameters(), *plain.gate.parameters()]
    reference = torch.optim.SGD(weights, lr=0.5)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        batches = torch.randn(2, 2, 8, 6, generator=generator)  # of both replicas
        loss = torch.stack([nn.functional.mse_loss(plain(x), y) for x, y in batches]).mean()
        reference.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(weights, 0.05)
        reference.step()
        x, y = batches[dist.get_rank()]
        torch.testing.assert_close(engine.train_batch(iter([(x, y)])), loss.detach())
        assert float(engine.get_global_grad_norm()) == pytest.approx(norm.item(), rel=1e-4)
    own_expert = plain.mixture.deepspeed_moe.experts.deepspeed_experts[0]
    torch.testing.assert_close(own_expert.weight, plain.experts[dist.get_rank()].weight)


@pytest.mark.parametrize("route", ROUTES)
def test_an_expert_of_deepspeed_learns_from_the_replicas_that_hold_it(route: str) -> None:
    on_ranks(2, _deepspeed_experts, route)
