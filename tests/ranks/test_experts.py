"""Expert parallelism on emulated devices, with uneven routing, faulty copies and ranks without tokens."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron import mpu
from megatron.config.command_line import parse, with_values
from megatron.model.dispatch import dispatch_to_experts
from megatron.model.layers import global_parameters
from megatron.ranks.errors import RunError
from megatron.ranks.replicas import check_replicas
from megatron.tasks import Llama
from megatron.training import start_engine
from tests.conformance.engines import remembered_groups
from tests.support import covering, on_ranks

from .nccl import nccl
from .test_nccl import _as_on

SEQ, VOCAB, GLOBAL_BATCH = 8, 40, 8
FLAGS = (
    f"--family llama --num-layers 4 --hidden-size 16 --num-attention-heads 2 --ff-hidden-size 12 --seq-length {SEQ} "
    "--normalization rmsnorm --activation swiglu --position-embedding rope --no-hidden-bias --hidden-dropout 0 "
    "--attention-dropout 0 --num-experts 4 --experts-per-token 2 --init-method-std 0.2 --router-aux-loss 0.1 "
    "--optimizer sgd --lr 0.3 --lr-decay-style constant --warmup 0 --batch-size 2 --train-iters 3 --precision fp32"
)


def _batches(step: int, gas: int, share: mpu.Axis) -> Any:
    generator = torch.Generator().manual_seed(step)
    samples = torch.randint(0, VOCAB, (GLOBAL_BATCH, SEQ + 1), generator=generator)
    for micro in samples.view(gas, share.size, 2, SEQ + 1)[:, share.rank]:
        yield {"text": micro}


class _Task(Llama):
    def batch(self, data: Any, config: Any, tokenizer: Any) -> Any:
        tokens, labels = data["text"][:, :-1].contiguous(), data["text"][:, 1:].contiguous()
        places = torch.arange(SEQ).expand(len(tokens), -1)
        none = torch.empty(0, dtype=torch.int32)
        return (tokens, places, none), (labels, torch.ones(labels.shape))


def _losses(flags: str, rules: str) -> list[float]:
    gas = GLOBAL_BATCH // 2 // (2 if dist.get_world_size() > 1 else 1)
    config = with_values(parse([*FLAGS.split(), *flags.split(), "--gas", str(gas)]), {"vocab_size": VOCAB})
    with remembered_groups():
        if rules == "none":
            return _train(config, gas)
        with nccl(rules) as device, _as_on(device):
            return _train(config, gas)


def _train(config: Any, gas: int) -> list[float]:
    engine = start_engine(_Task(), config)
    data = mpu.get_mesh().data
    return [float(engine.train_batch(_batches(step, gas, data), 0.3).loss) for step in range(3)]


EMULATED = [
    (schedule, rules)
    for schedule in ("1f1b", "zb-h1", "interleaved --virtual-pipeline-size 2")
    for rules in ("eager", "lazy", "one queue", "loading")
]
IN_CI = [each for each in EMULATED if each[1] == "one queue" and each[0] != "1f1b"]


@pytest.mark.parametrize(
    ("schedule", "rules"),
    covering(EMULATED, IN_CI.__contains__, several=True),
    ids=str,
)
def test_all_to_all_beside_the_messages_of_a_pipeline(schedule: str, rules: str) -> None:
    flags = f"--pipe-parallel-size 2 --expert-parallel-size 2 --pipeline-schedule {schedule}"
    (expected,) = on_ranks(1, _losses, "", "none")
    for found in on_ranks(4, _losses, flags, rules):
        assert found == pytest.approx(expected, rel=1e-5)


# ------------------------------------------------------- dispatch


class _Scale(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([number + 1.0], dtype=torch.float64))


def _dispatch(kind: str, tokens: tuple[int, ...]) -> tuple[Any, ...]:
    """Compare 4 experts, of which expert e multiplies by e + 1, with a loop over this rank's tokens."""
    mpu.initialize_model_parallel(expert_parallel_size=dist.get_world_size())
    axis, me = mpu.get_mesh().expert, dist.get_rank()
    here = 4 // axis.size
    mine = [_Scale(me * here + i) for i in range(here)]

    def apply(rows: Tensor, counts: Any) -> Tensor:
        return torch.cat([own * each.factor for each, own in zip(mine, rows.split(counts.tolist()), strict=True)])

    generator = torch.Generator().manual_seed(me)
    x = torch.randn(tokens[me], 3, generator=generator, dtype=torch.float64, requires_grad=True)
    experts = {
        "random": torch.randint(0, 4, (tokens[me], 2), generator=generator),
        "one": torch.full((tokens[me], 2), 2),
    }[kind]
    outputs = dispatch_to_experts(x, experts, 4, apply, axis)
    expected = x.detach().unsqueeze(1) * (experts.unsqueeze(-1) + 1.0).double()
    torch.testing.assert_close(outputs, expected)
    outputs.sum().backward()
    torch.testing.assert_close(x.grad, (experts + 1.0).sum(1, keepdim=True).expand(-1, 3).double())
    sums = torch.zeros(4, dtype=torch.float64).index_add_(
        0, experts.flatten(), x.detach().sum(1, keepdim=True).expand(-1, 2).flatten()
    )
    dist.all_reduce(sums)
    for each in mine:
        torch.testing.assert_close(each.factor.grad, sums[each_number(each)].view(1))
    return (len(mine),)


def each_number(scale: _Scale) -> int:
    return int(scale.factor.item()) - 1


@pytest.mark.parametrize("kind", ["random", "one"])
@pytest.mark.parametrize("tokens", [(5, 3, 2, 7), (0, 6, 0, 1), (0, 0, 0, 0)], ids=str)
def test_rows_reach_their_experts_and_come_back(kind: str, tokens: tuple[int, ...]) -> None:
    assert on_ranks(4, _dispatch, kind, tokens) == [(1,)] * 4


# ------------------------------------------------------- copies of experts


def _changed(which: str) -> str | None:
    config = with_values(parse([*FLAGS.split(), "--expert-parallel-size", "2"]), {"vocab_size": VOCAB})
    engine = start_engine(_Task(), config)
    check_replicas(engine.deepspeed)
    if dist.get_rank() == 2:
        dict(global_parameters(engine.deepspeed.module))[which].data.view(-1)[0] += 1
    try:
        check_replicas(engine.deepspeed)
    except RunError as error:
        return str(error)
    return None


def test_a_changed_copy_of_an_expert_is_named() -> None:
    name = "layers.1.mlp.experts.1.dense_4h_to_h.weight"  # ranks 0 and 2 hold experts 0 and 1
    for message in on_ranks(4, _changed, name):
        assert message is not None and name in message
