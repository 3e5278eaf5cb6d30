"""Weights with unusual strides learn with fused optimizers, which ignore strides, as in plain torch."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tds
from tests.support import on_ranks

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,
    "steps_per_print": 10**9,
    "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
}
KINDS = {
    "rows": lambda whole: whole,
    "transposed": lambda whole: whole.t(),
    "columns": lambda whole: whole.t()[:, :2],
}


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        weight = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
        self.weight = nn.Parameter(KINDS[kind](weight))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def _loss(output: Tensor, _: Any) -> Tensor:
    return (output**3).sum() / len(output)


def _batch(kind: str) -> Tensor:
    return torch.randn(8, len(Layer(kind).weight), generator=torch.Generator().manual_seed(1))


def _on_replicas(kind: str) -> Tensor:
    model = tds.PipelineModule([Layer(kind)], num_stages=1, loss_fn=_loss)
    engine = tds.initialize(model=model, config=CONFIG)[0]
    own = _batch(kind).chunk(4)[dist.get_rank() :: 2]  # two micro-batches
    for _ in range(3):
        engine.train_batch(iter([(x, torch.zeros(len(x))) for x in own]))
    (weight,) = model.parameters()
    return weight.detach().clone().contiguous()


@pytest.mark.parametrize("kind", KINDS)
def test_strided_weights_learn_on_several_replicas(kind: str) -> None:
    """After a reduction over replicas, gradients are contiguous, whatever the strides of the weights."""
    layer = Layer(kind)
    adam = torch.optim.Adam(layer.parameters(), lr=0.1, fused=False)
    for _ in range(3):
        _loss(layer(_batch(kind)), None).backward()
        adam.step()
        adam.zero_grad()
    for found in on_ranks(2, _on_replicas, kind):
        torch.testing.assert_close(found, layer.weight.detach().contiguous(), rtol=1e-4, atol=1e-5)
