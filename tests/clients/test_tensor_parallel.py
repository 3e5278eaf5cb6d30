"""A project with tensor parallelism in its layers and a tied embedding, on 2 stages x 2 tensor-parallel ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from tests.support import on_ranks

from .common import WIDTH, config, library, plain, sgd, trained
from .patterns import TokenEmbedding, built, cross_entropy, logits, seeded, tied_embedding

CLIP = 0.05


class _Copy(torch.autograd.Function):
    """Identity, with an all-reduce of the gradient over the group."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Sum(torch.autograd.Function):
    """All-reduce over the group, with the identity as its backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, group: Any) -> Tensor:
        total = inputs.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class ParallelBlock(nn.Module):
    """An MLP with its inner dimension sharded over a group; without a group, the whole MLP."""

    def __init__(self, seed: int, group: Any = None) -> None:
        super().__init__()
        self.group = group
        parts = dist.get_world_size(group) if group else 1
        part = dist.get_rank(group) if group else 0
        into = seeded(seed, lambda: nn.Linear(WIDTH, 2 * WIDTH)).weight.detach()
        back = seeded(seed + 10, lambda: nn.Linear(2 * WIDTH, WIDTH)).weight.detach()
        self.into = nn.Parameter(into.chunk(parts, 0)[part].clone())
        self.back = nn.Parameter(back.chunk(parts, 1)[part].clone())
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        for weight in (self.into, self.back):
            weight.model_parallel = group is not None  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        inputs = _Copy.apply(hidden, self.group) if self.group else hidden
        outputs = torch.tanh(inputs @ self.into.T) @ self.back.T
        if self.group:
            outputs = _Sum.apply(outputs, self.group)
        return hidden + outputs + self.bias


def _layers(group: Any) -> list[Any]:
    return [
        TiedLayerSpec("embed", TokenEmbedding),
        LayerSpec(ParallelBlock, 3, group),
        LayerSpec(ParallelBlock, 4, group),
        TiedLayerSpec("embed", TokenEmbedding, forward_fn=logits),
    ]


def _losses(name: str, clip: float) -> list[float]:
    lib = library(name)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pattern = tied_embedding()
    net = lib.PipelineModule(
        _layers(groups[dist.get_rank() // 2]),
        topology=PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1),
        loss_fn=cross_entropy,
        partition_method="uniform",
        activation_checkpoint_interval=1,
        checkpointable_layers=["ParallelBlock"],
    )
    settings = config(clip, pipeline={"pipe_partitioned": False, "grad_partitioned": False})
    engine = lib.initialize(model=net, optimizer=sgd(net), config=settings)[0]
    engine.set_batch_fn(pattern.batch_fn)
    return trained(engine, pattern.data)


@pytest.mark.full
@pytest.mark.parametrize(("name", "clip"), [("stock", 0.0), ("tds", 0.0), ("tds", CLIP)])
def test_tensor_parallel_layers_with_a_tied_embedding(name: str, clip: float) -> None:
    expected = plain(built(_layers(None)), cross_entropy, tied_embedding().batches(), clip)
    for found in on_ranks(4, _losses, name, clip):
        assert found == pytest.approx(expected, rel=1e-5)
