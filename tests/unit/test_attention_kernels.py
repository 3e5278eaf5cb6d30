"""The attention kernel fits a call's mask, bias and dropout, and computes the textbook's definition."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron import mpu
from megatron._torch import emulates_matmul
from megatron.model.attention_kernels import AttentionArgs, Mask, attend, choose_kernel
from megatron.model.context_attention import build_context_views
from megatron.model.masks import Documents, causal_mask, document_scope
from megatron.model.pieces import pieces_for

S = 8
IDS = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 3]])
SPLIT = torch.tensor([[1, 1, 2, 2, 1, 1, 3, 3]])
FIRST_OF_TWO = mpu.Axis(None, (0, 1), 0)


def _views(window: int | None = None) -> Any:
    return build_context_views(IDS, 2 * S, window, None, FIRST_OF_TWO)


def _kernel(mask: Mask, bias: Tensor | None = None, p: float = 0.0, fused: bool = True) -> str:
    x = torch.zeros(1, 2, S, 4)
    stream = mpu.Stream(mpu.RngStreams(), "attention")
    unfused = {"allow_per_document": fused, "allow_fused_bias": fused, "may_copy_qkv": fused}
    call = AttentionArgs(x, x, x, mask, bias, p, causal=True, scale=1.0, stream=stream, **unfused)
    if fused and isinstance(mask, tuple):
        call = call._replace(pieces=pieces_for(x, mask))
    return choose_kernel(call).__name__


LEARNED = torch.zeros(1, 2, S, S, requires_grad=True)
DOCUMENTS, PIECEMEAL = (document_scope(ids, causal=True) for ids in (IDS, SPLIT))
CASES: list[tuple[Mask, dict[str, Any], str]] = [
    (None, {}, "torch_sdpa"),
    (causal_mask(S, S, torch.device("cpu")), {}, "torch_sdpa"),
    (None, {"p": 0.1}, "attend_with_dropout"),
    (None, {"bias": LEARNED}, "attend_in_blocks"),
    (None, {"bias": LEARNED.detach()}, "torch_sdpa"),
    (None, {"bias": LEARNED, "p": 0.1}, "attend_with_dropout"),
    (None, {"bias": LEARNED, "fused": False}, "torch_sdpa"),
    (DOCUMENTS, {}, "flash_in_pieces"),
    (DOCUMENTS, {"p": 0.1}, "dropout_in_pieces"),
    (DOCUMENTS, {"bias": LEARNED}, "attend_in_blocks"),
    (DOCUMENTS, {"bias": LEARNED.detach()}, "attend_in_blocks"),
    (DOCUMENTS, {"bias": LEARNED, "p": 0.1}, "attend_with_dropout"),
    (DOCUMENTS, {"fused": False}, "torch_sdpa"),
    (Documents(IDS, SPLIT), {"p": 0.1}, "attend_with_dropout"),
    (PIECEMEAL, {}, "torch_sdpa"),
    (PIECEMEAL, {"p": 0.1}, "attend_with_dropout"),
    (_views(), {}, "flash_in_pieces"),
    (_views(), {"p": 0.1}, "slice_by_slice"),
    (_views(window=3), {}, "slice_by_slice"),
    (_views(), {"fused": False}, "slice_by_slice"),
]


def _bf16_call(queries: int, **more: Any) -> AttentionArgs:
    query, key, value = torch.randn(3, 1, 2, queries, 8, dtype=torch.bfloat16).unbind()
    stream = mpu.Stream(mpu.RngStreams(), "attention")
    return AttentionArgs(query, key, value, None, None, 0.0, True, 1.0, stream, True, **more)


@pytest.mark.skipif(emulates_matmul(torch.bfloat16) or not mpu.onednn_is_there(), reason="needs bf16 instructions")
@pytest.mark.parametrize("has_amx", [False, True])
def test_a_long_call_in_bf16_runs_in_blocks_without_amx(has_amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.model.special_kernels.has_amx_tiles", lambda: has_amx)
    names = [
        choose_kernel(_bf16_call(queries, allow_fused_bias=fused, may_copy_qkv=True)).__name__
        for queries, fused in ((128, True), (1, True), (128, False))
    ]
    assert names == ["torch_sdpa" if has_amx else "attend_in_blocks", "torch_sdpa", "torch_sdpa"]


@pytest.mark.parametrize("has_bias", [False, True])
def test_attention_in_bf16_compiles_without_a_break(has_bias: bool) -> None:
    bias = torch.randn(1, 2, 128, 128, dtype=torch.bfloat16, requires_grad=True) if has_bias else None
    call = _bf16_call(128, allow_fused_bias=True, may_copy_qkv=True)._replace(bias=bias)
    compiled = torch.compile(lambda query: attend(call._replace(query=query)), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(call.query), attend(call), atol=0.02, rtol=0.02)


@pytest.mark.parametrize(("mask", "more", "expected"), CASES)
def test_the_first_kernel_that_serves_is_chosen(mask: Mask, more: dict[str, Any], expected: str) -> None:
    assert _kernel(mask, **more) == expected


def _defined(c: AttentionArgs, sees: Tensor) -> Tensor:
    """Return the textbook's attention of a call, with `sees` [1 or b, q, k], which keys a query may see."""
    each = c.query.shape[1] // c.key.shape[1]
    key = c.key.repeat_interleave(each, 1)
    value = c.value.repeat_interleave(each, 1)
    scores = c.scale * torch.einsum("bnqd,bnkd->bnqk", c.query, key)
    if c.bias is not None:
        scores = scores + c.bias
    scores = scores.masked_fill(~sees.unsqueeze(1), -torch.inf)
    return torch.einsum("bnqk,bnkd->bnqd", scores.softmax(-1), value)


def _earlier() -> Tensor:
    return torch.ones(1, S, S).tril().bool()


def _same(ids: Tensor) -> Tensor:
    return ids.unsqueeze(2) == ids.unsqueeze(1)


def _calls() -> dict[str, tuple[Mask, bool, Tensor]]:
    """Return name -> (mask, whether it has a bias, which keys each query sees)."""
    window = _earlier() & ~torch.ones(1, S, S).tril(-3).bool()
    return {
        "causal": (None, False, _earlier()),
        "bool mask": (window.unsqueeze(1), False, window),
        "documents": (document_scope(IDS, causal=True), False, _earlier() & _same(IDS)),
        "scattered documents": (document_scope(SPLIT, causal=True), False, _earlier() & _same(SPLIT)),
        "bias": (None, True, _earlier()),
        "bias in documents": (document_scope(IDS, causal=True), True, _earlier() & _same(IDS)),
    }


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("name", list(_calls()))
@pytest.mark.parametrize("fused", [True, False])
def test_the_kernel_computes_the_definition(name: str, fused: bool, heads: int) -> None:
    """Values and gradients in fp64; a kernel that is added to the choice is compared here."""
    mask, has_bias, sees = _calls()[name]
    generator = torch.Generator().manual_seed(len(name))
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()  # noqa: E731
    inputs = [draw(1, 4, S, 8), draw(1, heads, S, 8), draw(1, heads, S, 8)]
    bias = draw(1, 4, S, S) if has_bias else None
    stream = mpu.Stream(mpu.RngStreams(), "attention")
    allowed = {"allow_per_document": fused, "allow_fused_bias": fused, "may_copy_qkv": fused}
    call = AttentionArgs(*inputs, mask, bias, 0.0, causal=True, scale=0.3, stream=stream, **allowed)
    leaves = [*inputs, bias] if bias is not None else inputs
    weights = torch.randn(1, 4, S, 8, generator=generator, dtype=torch.float64)
    found = attend(call)
    expected = _defined(call, sees)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad((found * weights).sum(), leaves)
    for own, its in zip(gradients, torch.autograd.grad((expected * weights).sum(), leaves), strict=True):
        torch.testing.assert_close(own, its, rtol=1e-11, atol=1e-11)


def test_a_kernel_gets_no_mask_with_context_parallelism() -> None:
    x = torch.zeros(1, 2, S, 4)
    stream = mpu.Stream(mpu.RngStreams(), "attention")
    fused = {"allow_per_document": True, "allow_fused_bias": True, "may_copy_qkv": True}
    call = AttentionArgs(x, x, x, _views(), None, 0.0, causal=True, scale=1.0, stream=stream, **fused)
    with pytest.raises(ValueError, match="context parallelism"):
        call.added()
