"""On 1 and 2 model-parallel ranks, fp8 layers round the same numbers to the same values."""

import pytest
import torch
from torch import Tensor

from megatron import mpu
from megatron.config.command_line import parse
from megatron.config.fields import ConfigError
from megatron.ranks import device
from megatron.ranks.initialize import initialize_megatron
from tests.parity.reference import Fp8Product
from tests.support import on_ranks


def draw(*shape: int, seed: int) -> Tensor:
    """Return bf16 numbers whose second half of columns is 21 times as large as the first half."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x[..., shape[-1] // 2 :] *= 21
    return x.bfloat16()


def _layers(ranks: int, sequence: bool) -> None:
    mpu.initialize_model_parallel(ranks, options=mpu.Options(fp8=True, sequence_parallel=sequence))
    axis = mpu.get_mesh().model
    column = mpu.ColumnParallelLinear(64, 96, bias=False, gather_output=False).bfloat16()
    row = mpu.RowParallelLinear(96, 32, bias=False, input_is_parallel=True).bfloat16()
    # Transposed, the second half of the column layer's output features is larger, so gradients need common scales, too.
    w1, w2 = draw(64, 96, seed=1).t().contiguous(), draw(32, 96, seed=2)
    column.weight.data, row.weight.data = w1.chunk(ranks)[axis.rank], w2.chunk(ranks, 1)[axis.rank].contiguous()
    whole, grad = draw(8, 2, 64, seed=3), draw(8, 2, 32, seed=4)
    own = axis.rank if sequence else 0
    parts = ranks if sequence else 1
    x = whole.chunk(parts)[own].clone().requires_grad_()
    inner, _ = column(x)
    y, _ = row(inner)
    y.backward(grad.chunk(parts)[own])

    x2, v1, v2 = (t.float().requires_grad_() for t in (whole, w1, w2))
    middle = Fp8Product.apply(x2, v1).bfloat16()  # type: ignore[no-untyped-call]
    expected = Fp8Product.apply(middle.float(), v2)  # type: ignore[no-untyped-call]
    expected.backward(grad.float())
    # The sums of all 64 features are on one rank, so the rounding of the result to bf16 is the only difference.
    torch.testing.assert_close(inner.float(), middle.chunk(ranks, -1)[axis.rank].float(), rtol=2**-7, atol=1e-2)
    close(y, expected.chunk(parts)[own])
    assert x.grad is not None and x2.grad is not None and v1.grad is not None and v2.grad is not None
    close(x.grad, x2.grad.chunk(parts)[own])
    close(column.weight.grad, v1.grad.chunk(ranks)[axis.rank])
    close(row.weight.grad, v2.grad.chunk(ranks, 1)[axis.rank])


def close(ours: Tensor | None, theirs: Tensor) -> None:
    """Compare within the rounding to bf16 of the ranks' partial sums; values rounded to fp8 differ by 2^-4."""
    assert ours is not None
    torch.testing.assert_close(ours.float(), theirs.detach(), rtol=2**-7, atol=theirs.abs().max().item() * 2**-8)


@pytest.mark.parametrize(("ranks", "sequence"), [(1, False), (2, False), (2, True)])
def test_layers_equal_one_process(ranks: int, sequence: bool) -> None:
    on_ranks(ranks, _layers, ranks, sequence)


def _start_without_a_kernel(precision: str) -> None:
    device.fp8_problem = lambda which: "it has no kernel"
    sizes = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8"
    initialize_megatron(parse(f"{sizes} --precision {precision}".split()))


def _refused() -> None:
    with pytest.raises(ConfigError, match="--precision fp8: this cpu device cannot be used, as it has no kernel"):
        _start_without_a_kernel("fp8")


def test_a_device_without_a_kernel_ends_the_run() -> None:
    on_ranks(1, _refused)
    on_ranks(1, _start_without_a_kernel, "bf16")
