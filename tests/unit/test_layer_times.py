"""Layers are divided into pipeline stages by their measured seconds."""

import itertools
import random

import pytest
import torch
from torch import Tensor, nn

from tds.layer_times import cut_by_time, layer_times


class _Counting(nn.Module):
    """A layer that counts its calls in a buffer, to which it assigns a new tensor, and has a buffer of stride 0."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("ones", torch.ones(1).expand(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return x


def test_measuring_a_module_leaves_its_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)  # there is one rank
    norm = nn.BatchNorm1d(3)
    counting = _Counting()
    assert len(layer_times([norm, counting, torch.tanh], 5 + torch.randn(4, 3), torch.device("cpu"))) == 3
    assert norm.num_batches_tracked == 0 and norm.training
    assert norm.running_mean is not None and norm.running_mean.tolist() == [0, 0, 0]
    assert norm.running_var is not None and norm.running_var.tolist() == [1, 1, 1]
    assert counting.calls == 0


def test_the_slowest_stretch_is_as_fast_as_can_be() -> None:
    """The slowest stage is as fast as possible; among such partitions, the sum of squared stage times is minimal."""
    rng = random.Random(1)
    for count in range(1, 9):
        for stretches in range(1, count + 1):
            seconds = [rng.random() for _ in range(count)]

            def slowest(cuts: list[int], seconds: list[float] = seconds) -> float:
                return max(sum(seconds[a:b]) for a, b in itertools.pairwise(cuts))

            found = cut_by_time(seconds, stretches)
            assert len(found) == stretches + 1
            ways = itertools.combinations(range(1, count), stretches - 1)
            every = [[0, *way, count] for way in ways]
            assert abs(slowest(found) - min(map(slowest, every))) < 1e-12

            def evenness(cuts: list[int], seconds: list[float] = seconds) -> float:
                return sum(sum(seconds[a:b]) ** 2 for a, b in itertools.pairwise(cuts))

            as_fast = [cuts for cuts in every if slowest(cuts) < slowest(found) + 1e-12]
            assert abs(evenness(found) - min(map(evenness, as_fast))) < 1e-12
