"""ZeRO 3 partitions each layer as soon as it is built; initial weights equal those without ZeRO 3."""

import gc
from typing import Any

import pytest
import torch
from torch import nn

from megatron.config.command_line import parse
from megatron.model import global_parameters
from megatron.model.layers import Layer
from megatron.mpu import get_mesh
from megatron.training import start_engine
from tds import optimizer_state
from tests.support import covering, on_ranks
from tests.text_task import TextTask

FLAGS = (
    "--batch-size 1 --pipe-parallel-size 0 --num-layers 6 --hidden-size 16 --num-attention-heads 4 --seq-length 8 "
    "--vocab-size 64 "
    "--make-vocab-size-divisible-by 16 --no-tensorboard"
)
T5 = "--family t5 --num-decoder-layers 2 --enc-seq-length 8 --position-embedding relative"


def _held() -> int:
    """Return the number of weight elements that this process holds."""
    gc.collect()
    return sum(p.numel() for p in gc.get_objects() if type(p) is nn.Parameter)


def _build(flags: str) -> tuple[list[int], int, dict[str, torch.Tensor]]:
    """Build a model; return (elements in memory before building each layer, elements of the model, its weights)."""
    held, honest, before = [], Layer.build, _held()

    def build(layer: Layer, seed: int) -> nn.Module:
        held.append(_held() - before)
        return honest(layer, seed)

    Layer.build = build  # type: ignore[method-assign]
    try:
        engine = start_engine(TextTask(), parse(f"{FLAGS} {flags}".split()))
    finally:
        Layer.build = honest  # type: ignore[method-assign]
    module: Any = engine.deepspeed.module
    groups = engine.deepspeed.optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.01, 0.0], "matrices decay, also if partitioned"
    weights = {name: optimizer_state.get_weight(p).clone() for name, p in global_parameters(module)}
    return held, sum(w.numel() for w in weights.values()), weights


def _both(precision: str, tp: int, family: str) -> int:
    common = f"{family} --precision {precision} --model-parallel-size {tp}"
    held, total, weights = _build(f"{common} --zero-stage 3")
    largest = max(w.numel() for w in weights.values())
    assert max(held) <= largest, "only shards, and small weights that DeepSpeed does not partition"
    held_whole, _, expected = _build(f"{common} --zero-stage 1")
    assert max(held_whole) > total // 2
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name].to(weight.dtype).view_as(weight), weight, rtol=0, atol=0, msg=name)
    return get_mesh().data.size


class Wrapped(nn.Module):
    """A user's model that contains a built-in model and adds a linear head and a buffer."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside, self.value = inside, nn.Linear(64, 1)
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.value(self.inside(tokens))
        return found * self.scale.to(found.dtype)


class WrappedTask(TextTask):
    def model(self, config: Any, tokenizer: Any) -> nn.Module:
        return Wrapped(super().model(config, tokenizer))


def _wrapped(precision: str) -> torch.dtype:
    engine = start_engine(WrappedTask(), parse(f"{FLAGS} --precision {precision} --zero-stage 3".split()))
    module: Any = engine.deepspeed.module
    assert all(p.numel() == 0 and p.ds_tensor.dtype == torch.bfloat16 for p in module.parameters())
    out = engine.deepspeed(torch.zeros(1, 8, dtype=torch.int64))
    engine.deepspeed.backward(out.float().sum())
    return out.dtype  # type: ignore[no-any-return]


def test_what_stands_around_the_layers_is_cut_and_cast_too() -> None:
    assert on_ranks(2, _wrapped, "bf16") == [torch.bfloat16] * 2


CASES = [(precision, tp, family) for family in ("", T5) for precision in ("fp32", "bf16") for tp in (1, 2)]


@pytest.mark.parametrize(
    ("precision", "tp", "family"), covering(CASES, [("bf16", 2, ""), ("fp32", 1, T5)].__contains__, True)
)
def test_no_rank_holds_the_whole_model(precision: str, tp: int, family: str) -> None:
    assert on_ranks(2 * tp, _both, precision, tp, family) == [2] * 2 * tp
