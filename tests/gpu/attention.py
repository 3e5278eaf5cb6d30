"""Checks of attention kernels in bf16 on this device against masked attention in fp32 on the CPU."""

from collections.abc import Sequence
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron import mpu
from megatron.model import context_attention, packed_attention
from megatron.model.attention_kernels import AttentionArgs, Mask, attend, choose_kernel
from megatron.model.context_attention import ContextViews
from megatron.model.masks import Documents, no_documents
from megatron.model.special_kernels import slice_by_slice
from megatron.ranks import device

B, HEADS, GROUPS, D = 2, 4, 2, 64
LIMIT = 0.03  # largest error of outputs and gradients, relative to the largest value; bf16 has 8 bits


def _inputs(length: int) -> list[Tensor]:
    """Return query [b, n, s, d], key and value [b, g, s, d] and the gradient of the output, in fp32 on the CPU."""
    dice = torch.Generator().manual_seed(1)
    return [torch.randn(B, heads, length, D, generator=dice) for heads in (HEADS, GROUPS, GROUPS, HEADS)]


def _call(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> AttentionArgs:
    stream = mpu.Stream(mpu.get_rng(), "tests.gpu")
    return AttentionArgs(query, key, value, mask, None, 0.0, True, D**-0.5, stream, True, True, True)


def _wanted(inputs: Sequence[Tensor], visible: Tensor) -> list[Tensor]:
    """Return output and gradients of masked attention in fp32. visible: bool [1 or b, 1, s, s]."""
    *given, grad = inputs
    learns = [x.clone().requires_grad_() for x in given]
    query, *others = learns
    key, value = (x.repeat_interleave(HEADS // GROUPS, 1) for x in others)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=visible)
    return [out.detach(), *torch.autograd.grad(out, learns, grad)]


def _off(found: Sequence[Tensor], wanted: Sequence[Tensor], what: str) -> str:
    """Return the largest relative error as text. Raises AssertionError if it is above LIMIT or not a number."""
    worst = 0.0
    for f, w in zip(found, wanted, strict=True):
        assert f.isfinite().all(), f"{what}: NaN or Inf"
        worst = max(worst, float((f.float().cpu() - w).abs().max() / w.abs().max()))
    assert worst <= LIMIT, f"{what}: off by {worst:.1e}, more than {LIMIT}"
    return f"{what} {worst:.1e}"


def _visible(numbers: Tensor | None, length: int, window: int | None = None, prefix: int = 0) -> Tensor:
    """Return the mask of a causal model, bool [1 or b, 1, s, s].

    numbers: document of each token, [b, s]; None for one document. window: number of last tokens that a query sees.
    prefix: number of tokens at the beginning of each 50 that attend to each other in both directions.
    """
    place = torch.arange(length)
    before = place[:, None] - place
    first = place % 50 < prefix
    sees = (before >= 0) & (before < (window or length)) | (first[:, None] & first)
    return sees[None, None] if numbers is None else (sees & (numbers[:, :, None] == numbers[:, None]))[:, None]


def packed_attention_agrees() -> str:
    """Check attention in bf16 within documents and with prefixes, and that CUDA packs documents without a prefix."""
    here, findings = device.current_device(), []
    for length in (192, 256):
        numbers = (torch.arange(length) // 50 + 1).expand(B, -1)
        prefixes = torch.where(torch.arange(length) % 50 < 20, -numbers, numbers)
        for form, ids, prefix in (("documents", numbers, 0), ("prefixes", prefixes, 20)):
            inputs = _inputs(length)
            wanted = _wanted(inputs, _visible(numbers, length, prefix=prefix))
            *learns, grad = (x.to(here, torch.bfloat16).requires_grad_() for x in inputs)
            call = _call(*learns, Documents(ids.contiguous().to(here), causal=True))
            out = attend(call)
            kernel = choose_kernel(call).__name__ if here.type != "cpu" else "flash_in_pieces"
            packs = here.type == "cuda" and torch.cuda.get_device_capability(here)[0] >= 8
            if packs and packed_attention.varlen_kernel() is not None:
                assert (kernel == "attend_packed") == (form == "documents"), f"{form} were computed by {kernel}"
            found = [out.detach(), *torch.autograd.grad(out, learns, grad.detach())]
            findings.append(_off(found, wanted, f"{form} of {length} ({kernel})"))
    return "; ".join(findings)


def context_kernels_agree() -> str:
    """Check the attention of each of two context-parallel ranks, given the keys and values of both ranks."""
    here, findings, length = device.current_device(), [], 256
    numbers = (torch.arange(length) // 50 + 1).expand(B, -1).contiguous()
    inputs = _inputs(length)
    for form, apart, window in (("causal", False, None), ("window", False, 40), ("documents", True, None)):
        ids = numbers if apart else no_documents(torch.device("cpu"))
        visible = _visible(numbers if apart else None, length, window)
        for rank in range(2):
            slices = tuple(mpu.context_slices(length, mpu.Axis(None, (0, 1), rank)))
            rows = torch.cat([torch.arange(begin, end) for begin, end in slices])
            query, key, value, grad = inputs
            alone = torch.zeros_like(grad)
            alone[:, :, rows] = grad[:, :, rows]  # this rank's part of the gradients of keys and values
            out, of_query, *others = _wanted([query, key, value, alone], visible)
            wanted = [out[:, :, rows], of_query[:, :, rows], *others]
            learns = [x.to(here, torch.bfloat16).requires_grad_() for x in (query[:, :, rows], key, value)]
            views = ContextViews(ids.to(here), apart, window, slices, mpu.Axis(None, (0,), 0))
            with patch.object(context_attention, "gather_keys_and_values", lambda key, value, axis: (key, value)):
                ours = slice_by_slice(_call(*learns, views))
            of_rows = grad[:, :, rows].to(here, torch.bfloat16)
            found = [ours.detach(), *torch.autograd.grad(ours, learns, of_rows)]
            findings.append(_off(found, wanted, f"{form}, rank {rank}"))
    return "; ".join(findings)
