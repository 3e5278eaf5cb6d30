"""Attention over packed documents is right; a stand-in replaces torch's GPU kernel for variable-length attention."""

import inspect

import pytest
import torch
from torch import Tensor

from megatron.model import packed_attention
from megatron.model.masks import Documents, document_mask

IDS = torch.tensor([[1, 1, 1, 2, 2, 3, 0, 0], [1] * 8, [1, 2, 3, 4, 5, 5, 5, 6]])


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    assert query.dim() == 3 and cu_seq_q.dtype == torch.int32 and max_q == max_k == IDS.shape[1]
    assert window_size in ((-1, 0), (-1, -1))
    found = []
    for begin, end in zip(cu_seq_q[:-1].tolist(), cu_seq_k[1:].tolist(), strict=True):
        q, k, v = (x[begin:end].transpose(0, 1) for x in (query, key, value))
        scores = q @ k.mT * scale
        if window_size[1] == 0:
            scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -torch.inf)
        found.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize("causal", [True, False])
def test_documents_are_packed_row_after_row(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_attention, "varlen_kernel", lambda: _varlen)
    documents = Documents(IDS.clone(), None, causal)
    drawn = torch.randn(8, 3, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    query, key, value = drawn.permute(3, 1, 2, 0, 4)
    ours = packed_attention.packed_attention(query, key, value, documents, 0.3)
    mask = document_mask(*documents)
    assert mask is not None
    theirs = (query @ key.mT * 0.3).masked_fill(~mask, -torch.inf).softmax(-1) @ value
    found, wanted = ([out, *torch.autograd.grad(out.square().sum(), drawn)] for out in (ours, theirs))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert packed_attention.compute_cu_seqlens(documents) is packed_attention.compute_cu_seqlens(documents), (
        "found once"
    )


def test_a_document_in_two_pieces_needs_the_mask() -> None:
    assert packed_attention.compute_cu_seqlens(Documents(torch.tensor([[1, 2, 1]]))) is None


def test_torchs_kernel_takes_what_the_stand_in_takes() -> None:
    theirs = packed_attention.varlen_kernel()
    if theirs is None:
        pytest.skip("this torch has no such kernel")
    real, ours = inspect.signature(theirs).parameters, inspect.signature(_varlen).parameters
    assert list(real)[:7] == list(ours)[:7] and all(real[name].kind == p.kind for name, p in ours.items())


def test_it_is_not_for_a_cpu() -> None:
    assert not packed_attention.supports_packing(torch.zeros(1, 2, 8, 8, dtype=torch.bfloat16), Documents(IDS[:1]))
