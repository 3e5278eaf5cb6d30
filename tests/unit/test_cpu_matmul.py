"""--cpu-matmul auto takes the faster kernel for each product of a linear layer, and remembers what it measured."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron import mpu
from megatron.config.command_line import parse
from megatron.config.fields import ConfigError
from megatron.features import cpu_matmul
from megatron.features.cpu_matmul import CpuMatmul, describe_cpu, is_conclusive, is_faster, measure_speedups
from megatron.model.attention_kernels import AttentionArgs, attend
from megatron.model.special_kernels import attend_in_fp32
from megatron.mpu import half_linear
from megatron.mpu.linear import SecondKernelUse, linear
from megatron.mpu.mesh import TRIVIAL_AXIS, Options
from megatron.training.feature import Plan

FAST, SLOW, UNSURE = [1.5] * 5, [0.7] * 5, [0.7, 0.8, 1.0, 1.3, 1.5]
needs_onednn = pytest.mark.skipif(not mpu.onednn_is_there(), reason="this build of torch has no oneDNN")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a cache that is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/megatron-cpu-matmuls.json"


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Speedups that the following measurements find, each a list for three products; a further one fails."""
    queue: list[Any] = []
    monkeypatch.setattr(cpu_matmul, "compare_kernels", lambda shape, dtype: queue.pop(0))
    return queue


def test_slow_quarters_decide() -> None:
    assert is_faster(FAST) and not is_faster(SLOW) and not is_faster(UNSURE)
    assert is_faster([0.2, 1.2, 1.3, 1.4, 1.5]), "one slow round of five does not count"
    assert not is_faster([1.0, 1.0, 1.3, 1.4, 1.5])


def test_measurements_are_kept_and_repeated_while_they_disagree(found: list[Any], cache: Path) -> None:
    shape = (64, 256, 256)
    found.append([FAST, UNSURE, SLOW])
    assert measure_speedups([shape], "fp32") == {shape: [FAST, UNSURE, SLOW]}
    found.append([FAST, FAST, SLOW])
    assert measure_speedups([shape], "fp32") == {shape: [FAST * 2, UNSURE + FAST, SLOW * 2]}
    found.append([FAST, FAST, SLOW])
    expected = {shape: [FAST * 3, UNSURE + FAST * 2, SLOW * 3]}
    assert measure_speedups([shape], "fp32") == expected
    assert measure_speedups([shape], "fp32") == expected, "15 rounds are enough"
    with pytest.raises(IndexError):
        measure_speedups([shape], "bf16")
    with pytest.raises(IndexError):
        measure_speedups([(128, 256, 256)], "fp32")


@pytest.mark.parametrize(
    "damage", ["[]", "{", '{"KEY": 1.5}', '{"KEY": [[1.5], [1.5]]}', '{"KEY": [["fast"], [], []]}']
)
def test_a_damaged_cache_is_measured_again(found: list[Any], cache: Path, damage: str) -> None:
    shape = (64, 256, 256)
    cache.parent.mkdir()
    cache.write_text(damage.replace("KEY", f"{describe_cpu()}, fp32, 64 x 256 x 256"))
    found.append([FAST, FAST, FAST])
    assert measure_speedups([shape], "fp32") == measure_speedups([shape], "fp32") == {shape: [FAST, FAST, FAST]}


def test_a_cache_that_cannot_be_written_costs_a_measurement(found: list[Any], cache: Path) -> None:
    cache.parent.write_text("in the way")
    for _ in range(2):
        found.append([FAST, SLOW, SLOW])
        assert measure_speedups([(64, 256, 256)], "fp32") == {(64, 256, 256): [FAST, SLOW, SLOW]}


def test_measurements_of_two_processes_are_both_kept(found: list[Any], cache: Path) -> None:
    found += [[FAST] * 3, [SLOW] * 3]
    measure_speedups([(64, 256, 256)], "fp32")
    measure_speedups([(64, 512, 256)], "fp32")
    assert len(json.loads(cache.read_text())) == 2
    assert all(map(is_conclusive, json.loads(cache.read_text()).values()))


def test_without_a_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    assert cpu_matmul.cache_file().parent.is_dir()


@needs_onednn
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_real_measurements_are_plausible(precision: str) -> None:
    for speedups in cpu_matmul.compare_kernels((64, 128, 256), precision):
        assert 1 <= len(speedups) <= cpu_matmul.ROUNDS
        assert all(0.001 < each < 1000 for each in speedups)


@pytest.mark.parametrize("is_emulated", [False, True])
def test_both_kernels_are_warm_when_they_are_measured(monkeypatch: pytest.MonkeyPatch, is_emulated: bool) -> None:
    calls: list[bool] = []

    def product(*_: Any) -> None:
        calls.append(bool(_[-1]))

    monkeypatch.setattr(cpu_matmul, "matmul", product)
    monkeypatch.setattr(cpu_matmul, "transposed_matmul", product)
    monkeypatch.setattr(cpu_matmul, "emulates_matmul", lambda dtype: is_emulated)
    speedups = cpu_matmul.compare_kernels((64, 128, 256), "bf16")
    rounds = 1 if is_emulated else cpu_matmul.ROUNDS
    assert [len(each) for each in speedups] == [rounds] * 3
    warm_up = [True] if is_emulated else [True, False]  # an emulated matmul takes too long
    assert calls == (warm_up + [False, True] * rounds) * 3


@pytest.mark.parametrize("has_amx", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [(3,), (512,), (5, 103), (2, 512), (1300,)])
def test_the_second_kernel_of_16_bits_equals_fp64(
    monkeypatch: pytest.MonkeyPatch, rows: tuple[int, ...], dtype: torch.dtype, has_amx: bool
) -> None:
    monkeypatch.setattr(half_linear, "multiplies_in_parts", lambda dtype: has_amx)
    parts = []
    plain = F.linear

    def linear(x: Tensor, *others: Any) -> Tensor:
        parts.append(len(x))
        return plain(x, *others)

    monkeypatch.setattr(half_linear.F, "linear", linear)
    dice = torch.Generator().manual_seed(1)
    x = torch.randn(*rows, 40, generator=dice).to(dtype).requires_grad_()
    weight = torch.randn(24, 40, generator=dice).to(dtype)
    bias = torch.randn(24, generator=dice).to(dtype)
    out = half_linear.half_linear(x, weight, bias)
    assert max(parts) <= 512 or not has_amx
    unit = torch.finfo(dtype).eps
    expected = x.detach().double() @ weight.double().T + bias.double()
    torch.testing.assert_close(out.detach().double(), expected, rtol=2 * unit, atol=8 * unit)
    grad = torch.randn(out.shape, generator=dice).to(dtype)
    (x_grad,) = torch.autograd.grad(out, x, grad)
    torch.testing.assert_close(x_grad.double(), grad.double() @ weight.double(), rtol=2 * unit, atol=8 * unit)
    with torch.no_grad():
        half_linear.half_linear(x, weight, None).mul_(2)  # an all-reduce changes results in place


def _plan(precision: str, flags: str = "", device: str = "cpu") -> Any:
    config = parse(f"--batch-size 2 --seq-length 64 {flags}".split())
    resolved: Any = type("Resolved", (), {"precision": precision})
    return Plan(None, config, resolved, torch.device(device), None)  # type: ignore[arg-type]


def _model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(
            mpu.VocabParallelEmbedding(300, 256),
            mpu.ColumnParallelLinear(256, 1024),
            mpu.RowParallelLinear(1024, 256),
            mpu.ColumnParallelLinear(256, 8),  # too small to be measured
        )


def test_each_weight_gets_its_own_choice(found: list[Any]) -> None:
    found += [[SLOW, FAST, SLOW], [FAST, FAST, SLOW], [SLOW, FAST, SLOW]]  # of the weights, in the order of their sizes
    feature = CpuMatmul()
    with mpu.built_with(mpu.Mesh(), Options()):
        feature.model(_model(), _plan("fp32"))
        options = mpu.get_options()
    products = {key[1:]: value for key, value in options.second_kernel.items()}
    assert set(key[0] for key in options.second_kernel) == {torch.float32}
    few = SecondKernelUse(False, True, False)
    assert products == {
        (256, 1024): few,
        (300, 256): SecondKernelUse(True, True, False),
        (1024, 256): few,
        (0, 0): few,
    }


@needs_onednn
def test_packed_weights_give_the_numbers_of_the_model(found: list[Any]) -> None:
    # The speedups are those of down, table and up.
    found += [[FAST, [0.0], [0.0]], [FAST, [0.0], [0.0]], [SLOW, [0.0], [0.0]]]
    model = _model().to_empty(device="cpu")
    table, up, down, _ = model
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.05)
    wide = {name: weight.detach().double() for name, weight in model.named_parameters()}
    cpu_matmul.pack_weights(model, 128)
    is_packed = [hasattr(module.weight, "packed") for module in model]
    assert is_packed == [True, False, True, False]
    assert table.weight.shape == (300, 256), "look-ups need it"
    assert down.weight.numel() == 0
    for ids in (torch.tensor([[3, 299]]), torch.arange(200)[None]):  # other numbers of rows than 128
        with torch.inference_mode():
            hidden, _ = down(up(table(ids))[0])
            logits = table.logits(hidden)
        inputs = wide["0.weight"][ids]
        expected = F.linear(F.linear(inputs, wide["1.weight"], wide["1.bias"]), wide["2.weight"], wide["2.bias"])
        torch.testing.assert_close(hidden.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(logits.double(), expected @ wide["0.weight"].t(), rtol=1e-5, atol=1e-5)


@needs_onednn
def test_measurements_of_packed_weights_have_no_gradients() -> None:
    speedups, *gradients = cpu_matmul.compare_kernels((2, 1024, 2048), cpu_matmul.PACKED)
    assert 1 <= len(speedups) <= cpu_matmul.ROUNDS and all(0.001 < each < 1000 for each in speedups)
    assert is_conclusive([FAST, *gradients]) and not any(map(is_faster, gradients))


@pytest.mark.parametrize(("precision", "device"), [("fp64", "cpu"), ("fp8", "cpu"), ("fp32", "meta"), ("bf16", "meta")])
def test_nothing_is_measured_where_there_is_no_choice(found: list[Any], precision: str, device: str) -> None:
    feature = CpuMatmul()
    with mpu.built_with(mpu.Mesh(), Options()):
        feature.model(_model(), _plan(precision, device=device))
        assert mpu.get_options().second_kernel == {}
    assert feature.state() == {}


def test_a_resumed_run_keeps_its_kernels(found: list[Any], monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    found += [[FAST] * 3] * 3
    first = CpuMatmul()
    with mpu.built_with(mpu.Mesh(), Options()):
        first.model(_model(), _plan("fp32"))
        before = mpu.get_options().second_kernel
    state = json.loads(json.dumps(first.state()))
    cache.unlink()
    for cpu, expected in ((describe_cpu(), True), ("another CPU", False)):
        found += [[SLOW] * 3] * 3
        monkeypatch.setattr(cpu_matmul, "describe_cpu", lambda cpu=cpu: cpu)
        with mpu.built_with(mpu.Mesh(), Options()):
            resumed = CpuMatmul()
            resumed.model(_model(), _plan("fp32"))
            resumed.load(state)
            assert (mpu.get_options().second_kernel == before) == expected
    for damage in (
        {},
        {**state, "products": [["fp32", 1, 2, True]]},
        {**state, "products": [["x", 1, 2, *[True] * 3]]},
    ):
        with pytest.raises(ValueError, match="cpu_matmul"):
            resumed.load({**state, "products": damage})


def test_the_flag_is_refused_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.ranks.initialize import _load_kernels

    monkeypatch.setattr("megatron.mpu.onednn_is_there", lambda: False)
    _load_kernels(parse([]), torch.device("cpu"))
    with pytest.raises(ConfigError, match="--cpu-matmul"):
        _load_kernels(parse(["--cpu-matmul", "onednn"]), torch.device("cpu"))


@pytest.mark.parametrize(
    "products",
    [SecondKernelUse(True, True, True), SecondKernelUse(False, True, False), SecondKernelUse(True, False, True)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_through_fp32_are_rounded_once(
    products: SecondKernelUse, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the second kernel computes is the exact result within one unit in the last place, as sums are in fp32.

    torch's own kernel rounds twice where there is a bias.
    """
    monkeypatch.setattr(half_linear, "multiplies_in_parts", lambda dtype: False)
    torch.manual_seed(3)
    o, i = 40, 24
    x = torch.randn(65, 3, i).transpose(0, 1).to(dtype).requires_grad_()
    weight = torch.randn(o, i).to(dtype).requires_grad_()
    bias = torch.randn(o).to(dtype).requires_grad_()
    grad = torch.randn(3, 65, o).to(dtype)
    options = Options(second_kernel={(dtype, o, i): products})
    ours = linear(x, weight, bias, TRIVIAL_AXIS, options)
    wide = [each.detach().double().requires_grad_() for each in (x, weight, bias)]
    exact = F.linear(*wide)
    found = [ours, *torch.autograd.grad(ours, (x, weight), grad)]
    right = [exact, *torch.autograd.grad(exact, wide[:2], grad.double())]
    for second, mine, true in zip(products, found, right, strict=True):
        assert mine.dtype == dtype
        unit = torch.finfo(dtype).eps if second else 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(mine.double(), true, rtol=unit, atol=1e-4 if second else unit)


def test_torch_may_add_to_the_gradient_of_a_weight_whose_product_it_computes() -> None:
    x = torch.randn(64, 8, requires_grad=True)
    weight = nn.Parameter(torch.randn(6, 8))
    calls = []

    def accumulate(grad: Tensor, given: Tensor) -> bool:
        calls.append(grad @ given)
        return True

    mpu.declare(weight)
    mpu.spec_of(weight).accumulate_wgrad = accumulate
    for by_second in (False, True):
        options = Options(second_kernel={(torch.float32, 6, 8): SecondKernelUse(False, True, by_second)})
        linear(x, weight, None, TRIVIAL_AXIS, options).sum().backward()
    assert len(calls) == 1
    torch.testing.assert_close(calls[0], weight.grad)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_runs_in_fp32_where_16_bits_are_emulated(monkeypatch: pytest.MonkeyPatch, masked: bool) -> None:
    monkeypatch.setattr("megatron.model.special_kernels.emulates_matmul", lambda dtype: dtype == torch.bfloat16)
    torch.manual_seed(2)
    query, key, value = (torch.randn(2, 4, 9, 16).bfloat16().requires_grad_() for _ in range(3))
    mask = torch.rand(2, 1, 9, 9) < 0.7 if masked else None
    if mask is not None:
        mask |= torch.eye(9, dtype=torch.bool)
    stream: Any = None
    call = AttentionArgs(query, key, value, mask, None, 0.0, True, 0.25, stream, True, True, True)
    ours = attend(call)
    wide = [each.detach().double().requires_grad_() for each in (query, key, value)]
    exact = F.scaled_dot_product_attention(*wide, attn_mask=mask, is_causal=not masked, scale=0.25)
    torch.testing.assert_close(ours.double(), exact, rtol=2**-8, atol=1e-5)  # one rounding to bf16
    grad = torch.randn_like(ours)
    mine = torch.autograd.grad(ours, (query, key, value), grad)
    for got, true in zip(mine, torch.autograd.grad(exact, wide, grad.double()), strict=True):
        torch.testing.assert_close(got.double(), true, rtol=2**-8, atol=1e-5)
    assert attend_in_fp32(call).dtype == torch.bfloat16
