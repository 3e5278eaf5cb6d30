"""Context-parallel attention equals attention over the whole sequence: masks, outputs and gradients."""

import itertools
import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron import mpu
from megatron.config import ModelConfig
from megatron.config.command_line import parse
from megatron.model.attention import Attention
from megatron.model.context_attention import build_context_views
from megatron.model.masks import document_scope, no_documents
from megatron.model.pieces import pieces_for
from megatron.mpu.mesh import Axis
from megatron.ranks.errors import RunError
from megatron.tasks import Llama
from megatron.training import start_engine
from tests.support import on_ranks

B, S, HEADS, D = 2, 48, 4, 8


class Case(NamedTuple):
    groups: int = HEADS
    documents: str = ""
    window: int | None = None
    reference_ops: tuple[str, ...] = ()
    again: bool = False


CASES = [
    Case(*sizes, reference_ops=reference_ops, again=again)
    for *sizes, reference_ops, again in itertools.product(
        (1, HEADS), ("", "long", "tiny", "torn"), (None, 5, 30), ((), ("document-attention",)), (False, True)
    )
]


def ids_of(kind: str) -> Tensor:
    """Return document ids [b, s] of one kind.

    "long": some documents are longer than a rank's chunk. "tiny": documents of one to three tokens. "torn": the tokens
    of one document are not adjacent. "": no ids.
    """
    if not kind:
        return no_documents(torch.device("cpu"))
    lengths = {"long": (3, 20, 1, 24), "tiny": (1,) * 5 + (2, 3) * 8 + (3,), "torn": (10, 10, 10, 18)}[kind]
    rows = [torch.repeat_interleave(torch.arange(len(each)), torch.tensor(each)) for each in (lengths, lengths[::-1])]
    ids = torch.stack(rows) + 1
    return torch.where(ids == 3, 1, ids) if kind == "torn" else ids


def allowed(ids: Tensor, window: int | None) -> Tensor:
    place = torch.arange(S)
    seen = (place[:, None] >= place).expand(B, S, S)
    if window:
        seen = seen & (place[:, None] - place < window)
    return (seen & (ids[:, :, None] == ids[:, None]) if ids.numel() else seen)[:, None]


def inputs(groups: int) -> list[Tensor]:
    dice = torch.Generator().manual_seed(3)
    shapes = (HEADS, groups, groups, HEADS)  # heads of queries, keys, values and the output's gradient
    return [torch.randn(B, heads, S, D, generator=dice, dtype=torch.float64) for heads in shapes]


def reference(case: Case) -> list[Tensor]:
    """Return attention's output and the gradients of queries, keys and values, each [b, heads, s, d]."""
    *given, grad = inputs(case.groups)
    q, k, v = (x.requires_grad_() for x in given)
    each = HEADS // case.groups
    scores = q @ k.repeat_interleave(each, 1).mT / math.sqrt(D)
    hidden = ~allowed(ids_of(case.documents), case.window)
    out = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v.repeat_interleave(each, 1)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in (q, k, v))]  # type: ignore[misc]


def _attention(case: Case, p: float = 0.0) -> Attention:
    sizes = {"num_attention_heads": HEADS, "hidden_size": HEADS * D, "num_key_value_heads": case.groups}
    config = ModelConfig(
        **sizes, attention_dropout=p, reference_ops=case.reference_ops, checkpoint_attention=case.again
    )  # type: ignore[arg-type]
    return Attention(config, "here", 0.02, causal=True).double()


def _body(world: int) -> list[str]:
    mpu.initialize_model_parallel(context_parallel_size=world)
    axis, bad = mpu.context_axis(), []
    for case in CASES:
        *given, grad = inputs(case.groups)
        own = [mpu.shard_sequence(x, 2, axis).clone().requires_grad_() for x in given]
        ids = ids_of(case.documents)
        views = build_context_views(ids, S, case.window, document_scope(ids, causal=True), axis)
        out = _attention(case).attend(own[0], own[1], own[2], views, None)  # [s/c, b, n d]
        out = out.view(-1, B, HEADS, D).permute(1, 2, 0, 3)
        out.backward(mpu.shard_sequence(grad, 2, axis))
        for name, found, whole in zip("oqkv", [out, *(x.grad for x in own)], reference(case), strict=True):
            worst = (found - mpu.shard_sequence(whole, 2, axis)).abs().max().item()  # type: ignore[operator]
            if not worst < 1e-12:
                bad.append(f"{case}: {name} is off by {worst:.1e}")
        in_pieces = pieces_for(own[0], views) is not None
        if in_pieces != (case.window is None and case.documents != "torn"):
            bad.append(f"{case}: in pieces {in_pieces}")
    return bad


@pytest.mark.parametrize("world", [2, 4])
def test_attention_over_ranks(world: int) -> None:
    for bad in on_ranks(world, _body, world):
        assert not bad, "\n".join(bad)


def _masks(world: int) -> tuple[Tensor, Tensor]:
    mpu.initialize_model_parallel(context_parallel_size=world)
    axis = mpu.context_axis()
    mpu.get_rng().begin(1)
    layer = _attention(Case(), p=0.5).train()
    views = build_context_views(no_documents(torch.device("cpu")), S, None, None, axis)
    even = torch.zeros(1, HEADS, S // world, D, dtype=torch.float64)
    values = torch.ones(1, HEADS, S // world, D, dtype=torch.float64)
    kept = layer.attend(even, even, values, views, None)
    dropped = mpu.Stream(mpu.get_rng(), "hidden").drop(torch.ones(500), 0.5)
    return kept, dropped


def test_dropout_is_not_repeated_on_another_rank() -> None:
    """Context-parallel ranks draw different dropout masks, and attention dropout keeps the mean."""
    found = on_ranks(2, _masks, 2)
    means = torch.stack([kept for kept, _ in found]).mean()
    assert abs(means - 1) < 0.05
    agree = (found[0][1] == found[1][1]).double().mean()
    assert 0.4 < agree < 0.6


def _round_trip(world: int) -> tuple[bool, Tensor]:
    mpu.initialize_model_parallel(context_parallel_size=world)
    axis = mpu.context_axis()
    whole = torch.arange(S * 3.0).view(S, 3)
    own = mpu.shard_sequence(whole, 0, axis).requires_grad_()
    again = mpu.gather_context(own, axis)
    (again * whole).sum().backward()
    assert own.grad is not None
    return torch.equal(again, whole), own.grad / mpu.shard_sequence(whole, 0, axis)


def test_gathered_tokens_stand_in_their_order() -> None:
    for equal, factor in on_ranks(2, _round_trip, 2):
        assert equal and torch.equal(factor.nan_to_num(2.0), torch.full_like(factor, 2.0))


def test_every_token_is_on_one_rank() -> None:
    for ranks in (1, 2, 4):
        axes = [Axis(None, tuple(range(ranks)), rank) for rank in range(ranks)]
        stretches = sorted(stretch for axis in axes for stretch in mpu.context_slices(16, axis))
        assert [token for begin, end in stretches for token in range(begin, end)] == list(range(16))
    with pytest.raises(ValueError, match="--context-parallel-size.*--seq-length"):
        mpu.context_slices(20, axes[0])


def _grid() -> Any:
    mesh = mpu.initialize_model_parallel(2, context_parallel_size=2)
    return mesh.context.ranks, mesh.share, mesh.data.ranks, str(mesh.topology), dist.get_world_size(mesh.context.group)


def test_the_grid() -> None:
    """Ranks are ordered by tensor-parallel, then context-parallel index; context-parallel ranks share samples."""
    found = on_ranks(8, _grid)
    assert [each[0] for each in found] == [(0, 2), (1, 3), (0, 2), (1, 3), (4, 6), (5, 7), (4, 6), (5, 7)]
    assert [each[1] for each in found] == [(0, 2)] * 4 + [(1, 2)] * 4
    assert found[5][2] == (1, 3, 5, 7) and found[0][3] == "pipe 1 x data 2 x context 2 x model 2"
    assert all(each[4] == 2 for each in found)


def test_one_rank_is_torchs_own() -> None:
    """`reference`, with which the other tests compare attention, equals torch's causal attention."""
    q, k, v, _ = inputs(HEADS)
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.allclose(reference(Case())[0], wanted, atol=1e-12)


class _Whole(Llama):
    """A user's task whose batches wrongly have whole sequences instead of this context-parallel rank's tokens."""

    shares_out_tokens = False


def _refused() -> str:
    flags = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 64 --precision fp32"
    try:
        start_engine(_Whole(), parse(f"{flags} --context-parallel-size 2".split()))
    except RunError as error:
        return str(error)
    return ""


def test_batches_of_whole_samples_are_refused() -> None:
    wanted = "--context-parallel-size 2: _Whole does not shard samples over context-parallel ranks"
    assert all(wanted in found for found in on_ranks(2, _refused))
