"""Matmuls and settings of --precision fp8, and the devices and sizes that it refuses."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron import mpu
from megatron.config.command_line import parse
from megatron.config.ds_config import resolve
from megatron.config.fields import ConfigError
from megatron.features.fp8 import Fp8, use_fp8
from megatron.model import GPT2Model
from megatron.mpu.fp8 import fp8_matmul
from megatron.ranks import device
from megatron.ranks.errors import RunError
from tests.parity.reference import Fp8Product

GPT2 = "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 8 --vocab-size 64 --precision fp8"


def draw(*shape: int, seed: int) -> Tensor:
    """Return bf16 numbers whose rows differ in size by powers of ten."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (x * 10.0 ** (torch.arange(x.shape[-2]) % 5 - 2).unsqueeze(-1)).bfloat16()


def test_a_layer_and_its_gradients_equal_a_reference_of_the_same_rounding() -> None:
    layer = mpu.ColumnParallelLinear(64, 48, options=mpu.Options(fp8=True)).bfloat16()
    x, grad = draw(5, 3, 64, seed=1).requires_grad_(), draw(5, 3, 48, seed=2)
    layer.weight.data, layer.bias.data = draw(48, 64, seed=3), draw(1, 48, seed=4)[0]
    y, _ = layer(x)
    y.backward(grad)

    x2, w2, b2 = (t.detach().float().requires_grad_() for t in (x, layer.weight, layer.bias))
    expected = Fp8Product.apply(x2, w2) + b2  # type: ignore[no-untyped-call]
    expected.backward(grad.float())
    for ours, theirs in ((y, expected), (x.grad, x2.grad), (layer.weight.grad, w2.grad), (layer.bias.grad, b2.grad)):
        # Both sum in fp32 in another order, and ours is rounded to bf16 once.
        torch.testing.assert_close(ours.float(), theirs, rtol=2**-8, atol=theirs.detach().abs().max().item() * 1e-5)
    unrounded = F.linear(x2, w2, b2)
    assert (unrounded - expected).abs().max() > 0.01 * expected.abs().max()


def test_the_weights_gradient_is_not_rounded_to_fp8() -> None:
    x, weight = draw(32, 16, seed=1), draw(16, 16, seed=2).requires_grad_()
    layer = mpu.ColumnParallelLinear(16, 16, bias=False, options=mpu.Options(fp8=True)).bfloat16()
    layer.weight.data = weight.detach()
    grad = draw(32, 16, seed=3)
    layer(x)[0].backward(grad)
    F.linear(x, weight).backward(grad)
    assert layer.weight.grad is not None and torch.equal(layer.weight.grad, weight.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("which", [0, 1])
def test_an_infinite_number_is_not_rounded_away(bad: float, which: int) -> None:
    factors = [torch.ones(4, 16, dtype=torch.bfloat16), torch.ones(16, 16, dtype=torch.bfloat16)]
    factors[which][2, 5] = bad
    found = fp8_matmul(*factors, None).isfinite()
    expected = torch.ones(4, 16, dtype=torch.bool)
    expected[(2, slice(None)) if which == 0 else (slice(None), 2)] = False
    assert torch.equal(found, expected)


def test_shards_of_rows_are_rounded_like_whole_rows() -> None:
    """Model-parallel ranks round their shards with scales of their own, to the values that one process gets."""
    x = draw(16, 32, seed=1)
    x[:, 16:] *= 21
    whole, shard = (fp8_matmul(part, torch.eye(part.shape[1]).bfloat16(), None) for part in (x, x[:, :16]))
    assert torch.equal(shard, whole[:, :16]) and not torch.equal(shard, x[:, :16])


def test_zeros_and_tiny_numbers() -> None:
    x = torch.zeros(2, 16, dtype=torch.bfloat16)
    x[1] = 2.0**-120
    assert fp8_matmul(x, torch.ones(16, 16, dtype=torch.bfloat16), None)[:, 0].tolist() == [0, 2.0**-116]


def test_the_other_settings_are_those_of_bf16() -> None:
    fp8, bf16 = (resolve(parse(GPT2.replace("fp8", name).split()), 1, False) for name in ("fp8", "bf16"))
    assert fp8 == bf16 and fp8.precision == "bf16"


@pytest.mark.parametrize("flags", ["--zero-stage 0", "--compile"])
def test_conflicts_are_refused(flags: str) -> None:
    with pytest.raises(ConfigError, match=flags.split()[0] if flags == "--compile" else "use --zero-stage 1"):
        resolve(parse(f"{GPT2} {flags}".split()), 1, False)


def test_only_layers_inside_transformer_layers_use_it() -> None:
    model = nn.Sequential(GPT2Model(parse(GPT2.split())), mpu.ColumnParallelLinear(16, 16))
    use_fp8(model)
    layers = (mpu.ColumnParallelLinear, mpu.RowParallelLinear, mpu.VocabParallelEmbedding)
    found = {name: m.options.fp8 for name, m in model.named_modules() if isinstance(m, layers)}
    assert sorted(name.split(".")[-1] for name in found if found[name]) == [
        "dense", "dense_4h_to_h", "dense_h_to_4h", "query_key_value",
    ]  # fmt: skip
    assert not found["1"] and len(found) > 5


def test_a_model_without_such_layers_is_refused() -> None:
    plan: Any = None
    with pytest.raises(RunError, match="--precision bf16"):
        Fp8().model(nn.Sequential(mpu.ColumnParallelLinear(16, 16)), plan)
    Fp8().model(GPT2Model(parse(GPT2.split())), plan)


def test_sizes_that_kernels_do_not_take_are_refused() -> None:
    model = GPT2Model(parse(f"{GPT2} --ff-hidden-size 72".split()))
    with pytest.raises(ValueError, match=r"mlp.dense_h_to_4h .* 72 x 32; change --hidden-size"):
        use_fp8(model)


def test_devices_without_fp8_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.fp8_problem(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda which: (8, 0))
    assert "compute capability is 8.0" in str(device.fp8_problem(torch.device("cuda")))

    def missing(*factors: Tensor) -> Tensor:
        raise NotImplementedError("no kernel\nmore")

    monkeypatch.setattr(device, "scaled_matmul", missing)
    assert "no such kernel for it (no kernel)" in str(device.fp8_problem(torch.device("cpu")))
