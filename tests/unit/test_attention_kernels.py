"""`choose_kernel` picks the attention kernel that fits a call's mask, bias and dropout."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron import mpu
from megatron.model.attention_kernels import Call, Mask, choose_kernel
from megatron.model.context_attention import views_of
from megatron.model.masks import Documents, causal_mask, document_scope
from megatron.model.pieces import pieces_for

S = 8
IDS = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 3]])
SPLIT = torch.tensor([[1, 1, 2, 2, 1, 1, 3, 3]])
FIRST_OF_TWO = mpu.Axis(None, (0, 1), 0)


def _views(window: int | None = None) -> Any:
    return views_of(IDS, 2 * S, window, None, FIRST_OF_TWO)


def _kernel(mask: Mask, bias: Tensor | None = None, p: float = 0.0, fused: bool = True) -> str:
    x = torch.zeros(1, 2, S, 4)
    stream = mpu.Stream(mpu.RngStreams(), "attention")
    unfused = {"by_document": fused, "fused_bias": fused, "packs": fused}
    call = Call(x, x, x, mask, bias, p, causal=True, scale=1.0, stream=stream, **unfused)
    if fused and isinstance(mask, tuple):
        call = call._replace(pieces=pieces_for(x, mask))
    return choose_kernel(call).__name__


LEARNED = torch.zeros(1, 2, S, S, requires_grad=True)
DOCUMENTS, PIECEMEAL = (document_scope(ids, causal=True) for ids in (IDS, SPLIT))
CASES: list[tuple[Mask, dict[str, Any], str]] = [
    (None, {}, "torchs"),
    (causal_mask(S, S, torch.device("cpu")), {}, "torchs"),
    (None, {"p": 0.1}, "dropout"),
    (None, {"bias": LEARNED}, "biased"),
    (None, {"bias": LEARNED.detach()}, "torchs"),
    (None, {"bias": LEARNED, "p": 0.1}, "dropout"),
    (None, {"bias": LEARNED, "fused": False}, "torchs"),
    (DOCUMENTS, {}, "flash_in_pieces"),
    (DOCUMENTS, {"p": 0.1}, "dropout_in_pieces"),
    (DOCUMENTS, {"bias": LEARNED}, "biased"),
    (DOCUMENTS, {"bias": LEARNED.detach()}, "biased"),
    (DOCUMENTS, {"bias": LEARNED, "p": 0.1}, "dropout"),
    (DOCUMENTS, {"fused": False}, "torchs"),
    (Documents(IDS, SPLIT), {"p": 0.1}, "dropout"),
    (PIECEMEAL, {}, "torchs"),
    (PIECEMEAL, {"p": 0.1}, "dropout"),
    (_views(), {}, "flash_in_pieces"),
    (_views(), {"p": 0.1}, "slice_by_slice"),
    (_views(window=3), {}, "slice_by_slice"),
    (_views(), {"fused": False}, "slice_by_slice"),
]


@pytest.mark.parametrize(("mask", "more", "expected"), CASES)
def test_the_first_kernel_that_serves_is_chosen(mask: Mask, more: dict[str, Any], expected: str) -> None:
    assert _kernel(mask, **more) == expected
