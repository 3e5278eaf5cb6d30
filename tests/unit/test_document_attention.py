"""Attention that is computed document by document equals attention with a mask and an explicit softmax."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron import mpu
from megatron.config.command_line import parse
from megatron.model import GPT2Model, T5Model
from megatron.model.block_attention import block_attention
from megatron.model.flash_attention import flash_attention
from megatron.model.masks import Documents
from megatron.model.pieces import MERGED_SIZE, pieces_for, pieces_of
from tests.sentences import SENTENCES

HEADS, WIDTH, SCALE = 3, 8, 0.3


def _rows(*rows: list[tuple[int, int]]) -> Tensor:
    """Return document ids [b, s] from rows of (document id, number of its tokens) pairs."""
    return torch.stack([torch.cat([torch.full((count,), number) for number, count in row]) for row in rows])


LONG = _rows([(1, 90), (2, 70), (3, 7), (4, 9), (5, 24)], [(1, 1), (2, 199)], [(1, 200)], [(1, 70), (2, 70), (0, 60)])
TINY = _rows([(i, 1) for i in range(1, 31)], [(i, 2) for i in range(1, 16)], [(1, 15), (2, 14), (3, 1)])
ENCODED = _rows([(1, 60), (2, 80), (3, 10), (0, 10)], [(2, 160)], [(1, 40), (0, 120)], [(1, 80), (2, 80)])
FEW = _rows([(1, 9), (3, 2), (4, 2), (0, 2)], [(1, 15)], [(i, 1) for i in range(1, 16)])
CASES = {
    "long": Documents(LONG, None, True),
    "tiny": Documents(TINY, None, True),
    "encoder": Documents(LONG),
    "cross": Documents(LONG, ENCODED),
    "cross, tiny": Documents(FEW, TINY),
}


def _written_down(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, bias: Tensor | float = 0.0
) -> Tensor:
    queries, keys, causal = documents
    keys = queries if keys is None else keys
    sees = queries[:, :, None] == keys[:, None, :]
    if causal:
        sees &= torch.arange(queries.shape[1])[:, None] >= torch.arange(keys.shape[1])
    sees |= ~sees.any(-1, keepdim=True) & (keys != 0)[:, None, :]
    scores = (query @ key.mT * SCALE + bias).masked_fill(~sees[:, None], -torch.inf)
    return scores.softmax(-1) @ value


def _drawn(documents: Documents, dtype: torch.dtype) -> list[Tensor]:
    """Return random queries, keys, values and an output gradient: views [b, n, s, d] of tensors [s, b, n, d]."""
    dice = torch.Generator().manual_seed(1)
    queries, keys, _ = documents
    shapes = [x.shape for x in (queries, *([queries if keys is None else keys] * 2), queries)]
    drawn = [torch.randn(s, b, HEADS, WIDTH, generator=dice, dtype=torch.float64).to(dtype) for b, s in shapes]
    return [x.permute(1, 2, 0, 3) for x in drawn]


def _gradients(call: Any, documents: Documents, dtype: torch.dtype) -> list[Tensor]:
    *inputs, grad = _drawn(documents, dtype)
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = call(*inputs, documents)
    return [out, *torch.autograd.grad(out, inputs, grad)]


def _ours(query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
    pieces = pieces_for(query, documents)
    assert pieces is not None
    return flash_attention(query, key, value, pieces, SCALE)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 5e-6), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("name", CASES)
def test_it_is_attention_with_a_mask(name: str, dtype: torch.dtype, tolerance: float) -> None:
    found, wanted = (
        _gradients(_ours, CASES[name], dtype),
        _gradients(_written_down, CASES[name], torch.float64),
    )
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["long", "tiny", "encoder"])
def test_with_a_learned_bias(name: str) -> None:
    documents = CASES[name]
    *inputs, grad = _drawn(documents, torch.float64)
    s = grad.shape[2]
    inputs = [x.detach().requires_grad_() for x in (*inputs, torch.randn(1, HEADS, s, s, dtype=torch.float64))]
    query, key, value, bias = inputs
    pieces = pieces_for(query, documents)
    ours, theirs = (
        [out, *torch.autograd.grad(out, inputs, grad)]
        for out in (
            block_attention(query, key, value, bias, pieces, SCALE),
            _written_down(query, key, value, documents, bias),
        )
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1, 30])
@pytest.mark.parametrize("masked", [False, True])
def test_appended_padding_of_keys_changes_nothing(masked: bool, size: int) -> None:
    """A document without keys sees the text only, as before padding is appended for sequence parallelism."""
    queries = _rows([(1, 4 * size), (3, 4 * size), (0, size)], [(1, size), (2, 6 * size), (0, 2 * size)])
    keys = _rows([(1, 3 * size), (2, 4 * size)], [(1, 7 * size)])
    text = Documents(queries, keys)
    padded = Documents(queries, torch.cat([keys, torch.zeros(2, 3, dtype=keys.dtype)], 1))
    query, key, value, _ = _drawn(padded, torch.float64)
    call = _masked if masked else _ours
    found = call(query, key, value, padded)
    whole = key[:, :, :-3]
    values = value[:, :, :-3]
    wanted = call(query, whole, values, text)
    real = queries != 0
    torch.testing.assert_close(found.transpose(1, 2)[real], wanted.transpose(1, 2)[real], rtol=1e-12, atol=1e-12)
    alone = slice(4 * size, 8 * size)  # document 3 of the first row, which has no keys
    every = (query @ whole.mT * SCALE).softmax(-1) @ values
    torch.testing.assert_close(found[0, :, alone], every[0, :, alone], rtol=1e-12, atol=1e-12)


def _masked(query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
    scores = (query @ key.mT * SCALE).masked_fill(~documents.mask(), -torch.inf)
    return scores.softmax(-1) @ value


def test_heads_lie_side_by_side_as_layers_go_on_with_them() -> None:
    out = _gradients(_ours, CASES["long"], torch.float32)[0]
    assert out.permute(2, 0, 1, 3).is_contiguous()


@pytest.mark.parametrize("name", CASES)
def test_pieces_hold_every_query_once_and_no_score_too_many(name: str) -> None:
    documents = CASES[name]
    pieces = pieces_of(documents)
    assert pieces is not None and pieces_of(documents) is pieces, "found once"
    seen = torch.zeros_like(documents.queries)
    for row, queries, keys, mask, *_ in pieces.items:
        seen[row, queries] += 1
        if mask is not None:
            assert mask.shape == (1, 1, queries.stop - queries.start, keys.stop - keys.start)
            assert mask.numel() <= MERGED_SIZE**2
    assert (seen == 1).all()


def test_tiny_documents_share_pieces() -> None:
    pieces = pieces_of(Documents(torch.arange(1, 513).expand(4, 512), None, True))
    assert pieces is not None and len(pieces.items) == 4 * 512 // MERGED_SIZE


def test_a_document_in_two_pieces_needs_the_mask() -> None:
    ids = _rows([(1, 3), (2, 3), (1, 3)])
    for documents in (Documents(ids), Documents(ids.clone(), None, True), Documents(ids.clone(), _rows([(1, 9)]))):
        assert pieces_of(documents) is None


def test_pieces_change_and_go_with_their_ids() -> None:
    gc.disable()
    try:
        ids = TINY.clone()
        before = pieces_of(Documents(ids, None, True))
        assert before is not None
        ids[2] = 1
        after = pieces_of(Documents(ids, None, True))
        assert after is not None and len(after.items) == len(before.items) and after.items[-1].mask is None
        assert before.items[-1].mask is not None
        gone = weakref.ref(before.items[-1].mask)
        del before, after, ids
        assert gone() is None, "without the collector of garbage"
    finally:
        gc.enable()


FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 160 --vocab-size 50 "
    "--make-vocab-size-divisible-by 2"
)
FAMILIES = {
    "gpt2": FLAGS,
    "t5": f"{FLAGS} --family t5 --enc-seq-length 200 --dec-seq-length 160",
    "t5, relative": f"{FLAGS} --family t5 --enc-seq-length 200 --dec-seq-length 160 --position-embedding relative",
}


@pytest.mark.parametrize("window", ["", "--sliding-window 3"])
def test_inference_mode_uses_the_ids_it_gets_and_leaves_training_possible(window: str) -> None:
    model: Any = GPT2Model(parse(f"{FLAGS} --hidden-dropout 0 --attention-dropout 0 {window}".split()))
    tokens = torch.arange(13).view(1, 13)  # a length that no other test uses
    kept_ids = _rows([(1, 4), (2, 9)])
    with torch.inference_mode():
        ids = torch.ones_like(kept_ids)
        model(tokens, None, ids)
        ids.copy_(kept_ids)
        found = model(tokens, None, ids), model(tokens, None, kept_ids)
    expected = model(tokens, None, kept_ids)
    expected.sum().backward()
    fresh = model(tokens, None, kept_ids.clone()).detach()
    torch.testing.assert_close(found, (fresh, fresh))


def _learns(flags: str) -> list[Tensor]:
    """Return a list: the losses [2, b, s] of all tokens in two micro-batches, then the gradients of their sum."""
    config = parse(flags.split())
    torch.manual_seed(1)
    model: Any = (T5Model if config.is_t5 else GPT2Model)(config).double()
    mpu.get_rng().begin(1)
    text, others = torch.arange(3 * 200).view(3, 200) % 50, torch.arange(4 * 160).view(4, 160) % 47
    losses = []
    for _ in range(2):
        if config.is_t5:
            losses.append(model(text, others[:3], LONG[:3], ENCODED[:3], labels=others[:3] // 2))
        else:
            losses.append(model(others, None, ENCODED, labels=others // 2))
    loss = torch.stack(losses)
    loss.sum().backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    "more", ["", "--checkpoint-attention", "--checkpoint-activations", "--recompute-modules norm qkv"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_models_learn_as_with_a_mask(family: str, more: str, dropout: float) -> None:
    flags = f"{FAMILIES[family]} --hidden-dropout {dropout} --attention-dropout {dropout}"
    ours, theirs = _learns(f"{flags} {more}"), _learns(f"{flags} --reference-ops document-attention biased-attention")
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("shape", [(2, 5), (1, 6), (2, 7)])
@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_ids_of_other_tokens_are_refused(family: str, shape: tuple[int, int]) -> None:
    """Document ids must have the shape of the tokens; otherwise, attention would leave some outputs uncomputed."""
    config = parse(
        f"--family {family} --num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 6 "
        "--vocab-size 32".split()
    )
    tokens, ids = torch.ones(2, 6, dtype=torch.int64), torch.ones(shape, dtype=torch.int64)
    model: Any = GPT2Model(config) if family == "gpt2" else T5Model(config)
    with pytest.raises(ValueError, match=SENTENCES["document_ids_do_not_fit"]):
        model(tokens, None, ids) if family == "gpt2" else model(tokens, tokens, ids, torch.ones_like(tokens))
