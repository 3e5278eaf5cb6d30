"""Custom backward passes give the gradients that autograd computes from the plain formulas."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import megatron.model.block_attention as block_attention_module
from megatron import mpu
from megatron.model.block_attention import block_attention
from megatron.model.gated_activations import gated_gelu
from megatron.model.rms_norm import RMSNorm
from megatron.mpu.linear import linear
from megatron.mpu.mesh import TRIVIAL_AXIS, Options
from tds.split_backward import backward_input

Inputs = tuple[Tensor, ...]


def _attention_inputs(dtype: torch.dtype) -> Inputs:
    dice = torch.Generator().manual_seed(1)
    shapes = ((3, 2, 5, 4), (3, 2, 7, 4), (3, 2, 7, 4), (1, 2, 5, 7))
    return tuple(torch.randn(s, generator=dice, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes)


def _mask(samples: int) -> Tensor | None:
    """Return a random mask [samples, 1, 5, 7] with at least one key for every query, or None for 0 samples."""
    if not samples:
        return None
    seen = torch.rand(samples, 1, 5, 7, generator=torch.Generator().manual_seed(2)) > 0.4
    return seen | (torch.arange(7) == 3)


def _plain(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
    scores = 0.7 * query @ key.mT + bias
    return torch.softmax(scores if mask is None else scores.masked_fill(~mask, -torch.inf), -1) @ value


@pytest.mark.parametrize("samples", [0, 1, 3], ids=["no mask", "one mask for all", "a mask each"])
def test_biased_attention(samples: int) -> None:
    mask, inputs = _mask(samples), _attention_inputs(torch.float64)
    grad = torch.randn(3, 2, 5, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    expected = _plain(*inputs, mask)
    found = block_attention(*inputs, mask, 0.7)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    pairs = zip(torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("has_amx", [False, True])
def test_biased_attention_in_bf16_is_as_near_as_rounding_lets_it_be(
    has_amx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_attention_module, "has_amx_tiles", lambda: has_amx)
    inputs = _attention_inputs(torch.bfloat16)
    wide = tuple(x.detach().double().requires_grad_() for x in inputs)
    ours = torch.autograd.grad(block_attention(*inputs, None, 0.7).sum(), inputs)
    theirs = torch.autograd.grad(_plain(*wide, None).sum(), wide)
    for mine, exact in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine.double(), exact, atol=2e-2, rtol=2e-2)  # tolerates bf16's 8 significant bits


def test_two_losses_of_biased_attention_have_their_own_bias_gradients() -> None:
    inputs = _attention_inputs(torch.float64)
    bias = inputs[3]
    found, expected = block_attention(*inputs, None, 0.7), _plain(*inputs, None)
    grad = torch.ones_like(found)
    for wanted in (inputs[3:], inputs[:1], inputs):
        ours, theirs = (torch.autograd.grad(out, wanted, grad, retain_graph=True) for out in (found, expected))
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)
    for other in (torch.cos(found.detach()), grad.mul_(3)):
        ours, theirs = (torch.autograd.grad(out, bias, other, retain_graph=True)[0] for out in (found, expected))
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


class _Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1, 2, 5, 5))

    def forward(self, x: Tensor) -> Tensor:
        return block_attention(x, 2 * x, 3 * x, self.bias, None, 0.7)


class _Multiplies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x.repeat(2, 1, 1, 1), self.weight, None, TRIVIAL_AXIS, Options(onednn=True))


needs_onednn = pytest.mark.skipif(not mpu.onednn_is_there(), reason="this build of torch has no oneDNN")


@pytest.mark.parametrize(
    "make",
    [_Attends, lambda: RMSNorm(4, eps=1e-6), pytest.param(_Multiplies, marks=needs_onednn)],
    ids=["biased attention", "rms norm", "linear by oneDNN"],
)
def test_the_backward_pass_may_be_cut_in_two(make: Callable[[], Any]) -> None:
    """A backward pass that is split as in zb-h1, into one for inputs and one for weights, gives the usual gradients."""
    torch.manual_seed(4)
    layer, x = make(), torch.randn(3, 2, 5, 4)
    (weight,) = layer.parameters()
    found = []
    for split in (False, True):
        weight.grad, leaf = None, x.clone().requires_grad_()
        out = layer(leaf)
        if split:
            rest = backward_input([out], [torch.cos(out.detach())], [leaf])
            assert weight.grad is None
            rest.run()
        else:
            out.backward(torch.cos(out.detach()))
        found.append((leaf.grad, weight.grad))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rms_norm(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    ours, theirs = RMSNorm(12, eps=1e-6, dtype=dtype), nn.RMSNorm(12, eps=1e-6, dtype=torch.float64)
    with torch.no_grad():
        theirs.weight.copy_(ours.weight.normal_())
    x, grad = torch.randn(3, 5, 12).to(dtype), torch.randn(3, 5, 12).to(dtype)
    # In bf16, only results are rounded, the output twice: to 8 significant bits each.
    atol, rtol = {torch.float64: (1e-12, 1e-12), torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-5, 2**-7)}[dtype]
    found = []
    for norm in (ours, theirs):
        leaf = x.detach().to(norm.weight.dtype, copy=True).requires_grad_()
        out = norm(leaf)
        out.backward(grad.to(out.dtype))
        found.append([each.double() for each in (out.detach(), leaf.grad, norm.weight.grad)])
    torch.testing.assert_close(*found, atol=atol, rtol=rtol)


def test_gated_gelu() -> None:
    torch.manual_seed(6)
    x = torch.randn(2, 3, 10, dtype=torch.float64, requires_grad=True)
    plain = F.gelu(x[..., ::2], approximate="tanh") * x[..., 1::2]
    grad = torch.randn_like(plain)
    torch.testing.assert_close(gated_gelu(x), plain)
    torch.testing.assert_close(torch.autograd.grad(gated_gelu(x), x, grad), torch.autograd.grad(plain, x, grad))


@needs_onednn
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("out", [9, 40])
def test_linear_by_onednn_is_fp32_to_its_last_bits(out: int, with_bias: bool) -> None:
    """oneDNN's linear layer is exact to a few fp32 roundings, also for non-contiguous inputs and gradients."""
    torch.manual_seed(7)
    x = torch.randn(10, 65, 7).transpose(0, 2).requires_grad_()  # [7, 65, 10], not contiguous
    inputs = [
        x,
        torch.randn(out, 10, requires_grad=True),
        *([torch.randn(out, requires_grad=True)] if with_bias else []),
    ]
    grad = torch.randn(out, 65, 7).transpose(0, 2)
    wide = [each.detach().double().requires_grad_() for each in inputs]
    ours, exact = (
        linear(inputs[0], inputs[1], inputs[2] if with_bias else None, TRIVIAL_AXIS, Options(onednn=True)),
        F.linear(*wide),
    )
    assert type(ours.grad_fn).__name__ == "_LinearBackward"
    found = [ours, *torch.autograd.grad(ours, inputs, grad)]
    for mine, true in zip(found, [exact, *torch.autograd.grad(exact, wide, grad.double())], strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), true, atol=2e-5, rtol=1e-5)  # rounding of sums of up to 7 x 65 terms


def test_what_onednn_does_not_do_is_torchs() -> None:
    weight = torch.randn(3, 4)
    for rows, dtype in ((4, torch.float32), (64, torch.float64), (64, torch.bfloat16)):
        x = torch.randn(rows, 4, dtype=dtype, requires_grad=True)
        assert (
            type(linear(x, weight.to(dtype), None, TRIVIAL_AXIS, Options(onednn=True)).grad_fn).__name__
            != "_LinearBackward"
        )


SHAPES = [(2, 4, 4, 200, 200, 16), (1, 4, 2, 130, 130, 32), (3, 6, 1, 70, 90, 8)]


@pytest.mark.parametrize("limits", [{}, {"MAX_SCORES": 1, "MIN_QUERIES": 33, "MAX_CAUSAL_QUERIES": 20}])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_amx", [False, True])
def test_attention_in_blocks_in_bf16_only_rounds(
    has_amx: bool, shape: tuple[int, ...], limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With grouped heads, hidden keys and blocks of any size, no result is further off than bf16's 8 bits explain."""
    monkeypatch.setattr(block_attention_module, "has_amx_tiles", lambda: has_amx)
    for name, limit in limits.items():
        monkeypatch.setattr(block_attention_module, name, limit)
    b, n, g, q, k, d = shape
    dice = torch.Generator().manual_seed(5)
    drawn = [torch.randn(b, h, s, d, generator=dice).bfloat16() for h, s in ((n, q), (g, k), (g, k), (n, q))]
    *inputs, grad = drawn
    causal = q == k
    mask = None if causal else torch.rand(b, 1, q, k, generator=dice) > 0.3
    if mask is not None:
        mask[0, 0, 5] = False  # a query that sees no key
    scope = torch.ones(q, k, dtype=torch.bool).tril() if mask is None else mask
    leaves = [x.requires_grad_() for x in inputs]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    ours = block_attention(*leaves, None, mask, 0.3, causal)
    theirs = scaled_dot_product_attention(*wide, attn_mask=scope, scale=0.3, enable_gqa=True)
    found = [ours, *torch.autograd.grad(ours, leaves, grad)]
    exact = [theirs, *torch.autograd.grad(theirs, wide, grad.double())]
    for mine, true in zip(found, exact, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.double() - true).norm() < 0.004 * true.norm()  # a rounding to 8 bits is off by up to 0.0039


def test_attention_in_blocks_keeps_its_precision_under_autocast_and_threads() -> None:
    query, key, value = torch.randn(3, 1, 2, 200, 16, generator=torch.Generator().manual_seed(6)).bfloat16().unbind()
    expected = block_attention(query, key, value, None, None, 4.0, True)
    settings: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    with torch.autocast("cpu", torch.bfloat16), ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: block_attention(query, key, value, None, None, 4.0, True), range(40)))
        found.append(block_attention(query, key, value, None, None, 4.0, True))
    torch.testing.assert_close(found, [expected] * 41, rtol=0, atol=0)
    assert settings.fp32_precision == before


def test_a_mask_of_padding_may_have_one_row_for_all_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_attention_module, "MAX_SCORES", 1)
    query, key, value = torch.randn(3, 2, 2, 150, 16, generator=torch.Generator().manual_seed(7)).bfloat16().unbind()
    mask = torch.arange(150).expand(2, 1, 1, 150) < torch.tensor([90, 150]).view(2, 1, 1, 1)
    found = block_attention(query, key, value, None, mask, 0.25)
    torch.testing.assert_close(found, block_attention(query, key, value, None, mask.expand(2, 1, 150, 150), 0.25))


def _second_derivatives(function: Callable[..., Tensor], inputs: Inputs) -> Inputs:
    """Return the gradients of the summed squares of the gradients of the summed squares of the output."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    grads = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
    penalty = torch.stack([grad.square().sum() for grad in grads]).sum()
    return torch.autograd.grad(penalty, leaves)


@pytest.mark.parametrize("onednn", [False, True])
def test_second_derivatives_of_a_linear_layer(onednn: bool) -> None:
    if onednn and not mpu.onednn_is_there():
        pytest.skip("this build of torch has no oneDNN")
    dice = torch.Generator().manual_seed(4)
    inputs = (torch.randn(64, 8, generator=dice), torch.randn(16, 8, generator=dice))
    options = Options(onednn=onednn)
    found = _second_derivatives(lambda x, w: torch.tanh(linear(x, w, None, TRIVIAL_AXIS, options)), inputs)
    expected = _second_derivatives(lambda x, w: torch.tanh(F.linear(x, w)), tuple(x.double() for x in inputs))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


def test_second_derivatives_of_an_rms_norm() -> None:
    dice = torch.Generator().manual_seed(5)
    inputs = (torch.randn(6, 8, generator=dice), torch.randn(8, generator=dice))
    norm = RMSNorm(8, eps=1e-5)
    found = _second_derivatives(lambda x, w: torch.func.functional_call(norm, {"weight": w}, (x,)), inputs)
    expected = _second_derivatives(
        lambda x, w: w * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt(), tuple(x.double() for x in inputs)
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))
