"""Sequence parallelism gives plain torch's outputs and gradients, and its layers call only necessary collectives."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron import mpu
from megatron.config import ModelConfig
from megatron.model.block import Block
from megatron.model.cross_attention import Encoded
from megatron.model.t5 import DecoderBlock
from tests.support import on_ranks

from .test_mpu import draw

SEQ, BATCH = 8, 3


def _stretch(x: Tensor, axis: mpu.Axis) -> Tensor:
    return x.chunk(axis.size)[axis.rank].clone()


def _linear(ranks: int) -> None:
    mpu.initialize_model_parallel(ranks, options=mpu.Options(sequence_parallel=True))
    axis = mpu.get_mesh().model
    column = mpu.ColumnParallelLinear(8, 16, gather_output=False).double()
    row = mpu.RowParallelLinear(16, 4, input_is_parallel=True).double()
    w1, b1, w2, b2 = draw(16, 8, seed=1), draw(16, seed=2), draw(4, 16, seed=3), draw(4, seed=4)
    with torch.no_grad():
        column.weight.copy_(w1.chunk(axis.size)[axis.rank])
        column.bias.copy_(b1.chunk(axis.size)[axis.rank])
        row.weight.copy_(w2.chunk(axis.size, 1)[axis.rank])
        row.bias.copy_(b2)
    whole = draw(SEQ, BATCH, 8)
    x = _stretch(whole, axis).requires_grad_()
    z = row(torch.tanh(column(x)[0]))[0]
    # A zero-bubble schedule computes the gradients of activations and of weights in two passes.
    z.square().sum().backward(inputs=[x], retain_graph=True)
    z.square().sum().backward(inputs=[*column.parameters(), *row.parameters()])

    plain = [t.clone().requires_grad_() for t in (whole, w1, b1, w2, b2)]
    expected = F.linear(torch.tanh(F.linear(plain[0], plain[1], plain[2])), plain[3], plain[4])
    expected.square().sum().backward()
    torch.testing.assert_close(z, _stretch(expected, axis))
    torch.testing.assert_close(x.grad, _stretch(plain[0].grad, axis))
    torch.testing.assert_close(column.weight.grad, plain[1].grad.chunk(axis.size)[axis.rank])
    torch.testing.assert_close(column.bias.grad, plain[2].grad.chunk(axis.size)[axis.rank])
    torch.testing.assert_close(row.weight.grad, plain[3].grad.chunk(axis.size, 1)[axis.rank])
    torch.testing.assert_close(row.bias.grad, plain[4].grad)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_column_then_row_equals_two_linears(ranks: int) -> None:
    on_ranks(ranks, _linear, ranks)


def _ways(ranks: int) -> None:
    """Check outputs and gradients of the three functions that enter or leave the sequence-parallel region."""
    mpu.initialize_model_parallel(ranks, options=mpu.Options(sequence_parallel=True))
    axis = mpu.get_mesh().model
    by_rank = [draw(SEQ, 2, seed=rank) for rank in range(ranks)]
    mine = by_rank[axis.rank].clone().requires_grad_()
    total = torch.stack(by_rank).sum(0)

    summed = mpu.reduce_scatter_to_sequence_parallel_region(mine)
    torch.testing.assert_close(summed, _stretch(total, axis))
    (summed * (axis.rank + 1)).sum().backward()
    factors = torch.arange(1, ranks + 1, dtype=torch.float64).repeat_interleave(SEQ // ranks)
    torch.testing.assert_close(mine.grad, factors.unsqueeze(1).expand(SEQ, 2))

    part = _stretch(total, axis).requires_grad_()
    gathered = mpu.gather_from_sequence_parallel_region(part)
    torch.testing.assert_close(gathered, total)
    (gathered * (axis.rank + 1)).sum().backward()
    torch.testing.assert_close(part.grad, torch.full_like(part, ranks * (ranks + 1) / 2))

    same = total.clone().requires_grad_()
    scattered = mpu.scatter_to_sequence_parallel_region(same)
    torch.testing.assert_close(scattered, _stretch(total, axis))
    (scattered * (axis.rank + 1)).sum().backward()
    torch.testing.assert_close(same.grad, factors.unsqueeze(1).expand(SEQ, 2))


def test_ways_in_and_out() -> None:
    on_ranks(4, _ways, 4)


def _uneven() -> str:
    mpu.initialize_model_parallel(2, options=mpu.Options(sequence_parallel=True))
    try:
        mpu.local_shard(torch.zeros(7, 2))
    except ValueError as error:
        return str(error)
    return ""


def test_a_length_that_cannot_be_split_names_the_knobs() -> None:
    for message in on_ranks(2, _uneven):
        assert "7 tokens over 2" in message
        assert "mpu.pad_sequence" in message


# -------------------------------------------------------------------------- number of collectives


class Talk:
    """Context manager that counts calls of torch.distributed's collectives by name."""

    NAMES = (
        "all_reduce",
        "all_gather_single",
        "all_gather_into_tensor",
        "all_to_all_single",
        "all_gather",
        "broadcast",
    )

    def __enter__(self) -> Counter[str]:
        self.found: Counter[str] = Counter()
        self.before = {name: getattr(dist, name) for name in self.NAMES if hasattr(dist, name)}
        for name, real in self.before.items():
            kind = "all_gather" if name.startswith("all_gather") else name  # its other names depend on the release
            setattr(dist, name, self._counted(kind, real))
        return self.found

    def _counted(self, name: str, real: Any) -> Any:
        def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            # A tensor smaller than the hidden states is the gradient of a replicated weight.
            self.found[name if x.numel() >= SEQ * BATCH * 16 // 2 else f"{name} of a weight"] += 1
            return real(x, *args, **kwargs)

        return call

    def __exit__(self, *_: object) -> None:
        for name, real in self.before.items():
            setattr(dist, name, real)


def _count(sequence_parallel: bool, cross: bool, recompute: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Return collective -> number of calls in a layer's forward pass, and the same for its backward pass."""
    mpu.initialize_model_parallel(2, options=mpu.Options(sequence_parallel))
    config = ModelConfig(
        hidden_size=16, num_attention_heads=2, hidden_dropout=0, attention_dropout=0, checkpoint_attention=recompute
    )
    layer = DecoderBlock(config, "x") if cross else Block(config, "x")
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = mpu.local_shard(draw(SEQ, BATCH, 16).float()).requires_grad_()
    encoded = Encoded(mpu.local_shard(draw(SEQ, BATCH, 16, seed=1).float()).requires_grad_(), None) if cross else None
    with Talk() as there:
        y = layer.run_layer(x, None, encoded=encoded)
    with Talk() as back:
        y.square().sum().backward()
    return dict(there), dict(back)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_layer_makes_two_all_reduces_forward_and_two_backward(recompute: bool) -> None:
    """A tensor-parallel layer needs two all-reduces forward and two backward, as in Shoeybi et al. 2019.

    Recomputing attention adds no all-reduce.
    """
    for there, back in on_ranks(2, _count, False, False, recompute):
        assert there == {"all_reduce": 2}
        assert back == {"all_reduce": 2}


def test_a_decoder_layer_adds_one_forward_and_two_backward() -> None:
    """Cross-attention adds one all-reduce to the forward pass and two to the backward pass, one for each input."""
    for there, back in on_ranks(2, _count, False, True, False):
        assert there == {"all_reduce": 3}
        assert back == {"all_reduce": 4}


def test_with_sequence_parallelism_pairs_stand_for_all_reduces() -> None:
    """Sequence parallelism replaces each all-reduce by an all-gather and a reduce-scatter.

    On CPUs, the reduce-scatter is an all_to_all_single followed by a local sum.
    The backward pass also gathers two inputs again, and all-reduces the gradients of six replicated weights.
    """
    for there, back in on_ranks(2, _count, True, False, False):
        assert there == {"all_gather": 2, "all_to_all_single": 2}
        assert back == {"all_gather": 4, "all_to_all_single": 2, "all_reduce of a weight": 6}
