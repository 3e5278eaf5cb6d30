"""Layers are divided into pipeline stages by their measured seconds."""

import itertools
import random
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megatron.config.command_line import parse
from megatron.model.gpt2_layers import gpt2_layers
from tds.layer_times import cut_by_time, layer_times
from tests.checkpoints.runs import Start, make
from tests.support import on_ranks


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


@pytest.mark.parametrize("experts", [0, 2])
def test_a_head_that_defers_its_logits_is_measured(experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With experts, the last layer returns the deferred logits and the loss of the routers."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)  # there is one rank
    flags = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --vocab-size 64 --seq-length 16"
    flags += " --family gpt2 --logits-chunk-size 8"
    if experts:
        flags += f" --num-experts {experts}"
    functions = []
    for layer in gpt2_layers(parse(flags.split()), 64):
        module = layer.build(1)
        functions.append(partial(layer.call, module) if layer.call else module)
    inputs = (torch.zeros(1, 16).long(), torch.arange(16)[None], torch.empty(0, dtype=torch.int16))
    assert len(layer_times(functions, inputs, torch.device("cpu"))) == len(functions)


def _start(folder: str, data: str, vocab_file: str, flags: str) -> None:
    make(Start("t5-cpm", Path(folder), f"{flags} --partition-method measured"), data, vocab_file)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, "--pipe-parallel-size 1 --enc-seq-length 16 --max-position-embeddings 32 --seq-length 1024"),
        (2, "--pipe-parallel-size 1 --model-parallel-size 2 --sequence-parallel --enc-seq-length 15 --seq-length 36"),
    ],
    ids=["learned positions", "sequence parallelism"],
)
def test_the_layers_of_a_t5_are_measured_on_samples_of_its_lengths(
    ranks: int, flags: str, tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    on_ranks(ranks, _start, str(tmp_path), tiny_data, vocab_file, flags)


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
