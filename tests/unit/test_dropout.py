"""Each dropout site has its own random stream, and its masks equal those of torch's dropout with the same seed."""

import copy
import pickle
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron import mpu
from megatron.model.attention_dropout import attention_with_dropout, dropout_by_document
from megatron.model.masks import Documents, causal_mask, to_additive_mask
from megatron.model.pieces import pieces_of


def _rng() -> mpu.RngStreams:
    rng = mpu.RngStreams(seed=5, data_rank=1, model_rank=2)
    rng.begin(7)
    return rng


@pytest.mark.parametrize("p", [0.3, 1.0])
def test_it_is_torchs_dropout(p: float) -> None:
    x = torch.randn(40, 3, 16, requires_grad=True)
    stream, peeked = mpu.Stream(_rng(), "a"), _rng()
    for _ in range(2):
        ours = stream.drop(x, p)
        with mpu.seeded(peeked.next_seed("a", split=False)):
            theirs = F.dropout(x, p)
        assert torch.equal(ours, theirs)
        assert torch.equal(*(torch.autograd.grad(out.sum(), x)[0] for out in (ours, theirs)))


def test_sites_draws_and_ranks_differ_and_begin_starts_again() -> None:
    ones = torch.ones(200)
    rng, other = _rng(), mpu.RngStreams(seed=5, data_rank=1, model_rank=3)
    other.begin(7)
    first, second = mpu.Stream(rng, "a"), mpu.Stream(rng, "b")
    drawn = [first.drop(ones, 0.5), first.drop(ones, 0.5), second.drop(ones, 0.5)]
    drawn.append(mpu.Stream(rng, "c", split=True).drop(ones, 0.5))
    drawn.append(mpu.Stream(other, "c", split=True).drop(ones, 0.5))
    assert not any(torch.equal(x, y) for i, x in enumerate(drawn) for y in drawn[:i])
    assert torch.equal(mpu.Stream(other, "a").drop(ones, 0.5), drawn[0])
    rng.begin(7)
    assert torch.equal(first.drop(ones, 0.5), drawn[0]) and torch.equal(first.drop(ones, 0.5), drawn[1])
    rng.begin(8)
    assert not torch.equal(first.drop(ones, 0.5), drawn[0])


def test_an_iteration_seeds_the_generators_of_the_process() -> None:
    """Layers may draw from NumPy, as layer drop does, and must draw the same on all ranks and after a resume."""
    drawn = []
    for model_rank, iteration in ((2, 7), (3, 7), (2, 8)):
        mpu.RngStreams(seed=5, data_rank=1, model_rank=model_rank).begin(iteration)
        drawn.append([torch.rand(()).item(), np.random.rand(), random.random()])
    assert drawn[0] == drawn[1]
    assert all(a != b for a, b in zip(drawn[0], drawn[2], strict=True))


def test_torchs_own_generator_is_left_alone() -> None:
    stream = mpu.Stream(_rng(), "a")
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    stream.drop(torch.ones(9), 0.5)
    assert torch.equal(torch.rand(3), expected)


def test_a_compiled_graph_draws_the_same_and_takes_any_stream() -> None:
    rng, ones = _rng(), torch.ones(64)
    streams = [mpu.Stream(rng, name) for name in "abc"]
    expected = [stream.drop(ones, 0.5) for stream in streams]
    rng.begin(7)
    compiled = torch.compile(lambda stream: stream.drop(ones, 0.5), fullgraph=True, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    assert all(torch.equal(compiled(stream), wanted) for stream, wanted in zip(streams, expected, strict=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_several_draws_in_one_graph_are_several() -> None:
    """Two draws from one stream with different `turn` stay different, though torch.compile merges equal operations."""
    rng, x = _rng(), torch.ones(64, requires_grad=True)
    stream = mpu.Stream(rng, "a")

    def twice() -> tuple[Tensor, Tensor]:
        return stream.drop(x, 0.5), stream.drop(x, 0.5, turn=1)

    expected = twice()
    rng.begin(7)
    found = torch.compile(twice, fullgraph=True, backend="aot_eager_decomp_partition")()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_copy_has_a_number_of_its_own() -> None:
    stream = mpu.Stream(_rng(), "a")
    for other in (copy.deepcopy(stream), pickle.loads(pickle.dumps(stream))):
        assert other.number != stream.number
        assert torch.equal(other.drop(torch.ones(9), 0.5), mpu.Stream(_rng(), "a").drop(torch.ones(9), 0.5))


def test_a_copied_layer_draws_from_the_streams_of_the_process() -> None:
    rng = _rng()
    stream = mpu.Stream(rng, "a")
    other = copy.deepcopy(stream)
    masks = [stream.drop(torch.ones(99), 0.5), other.drop(torch.ones(99), 0.5)]
    assert not torch.equal(*masks), "two layers, two draws"
    rng.begin(7)
    assert torch.equal(other.drop(torch.ones(99), 0.5), masks[0])


def _factors(weights: Tensor) -> Tensor:
    return mpu.Stream(_rng(), "a", split=True).draw(weights.shape, 0.4, weights.device, weights.dtype) / 0.6


def _same(ours: Tensor, theirs: Tensor, inputs: list[Tensor]) -> None:
    found, wanted = ([out, *torch.autograd.grad(out.square().sum(), inputs)] for out in (ours, theirs))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_attention_drops_weights() -> None:
    query, key, value = (torch.randn(2, 3, 10, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = causal_mask(10, 10, query.device)
    ours = attention_with_dropout(
        query, key, value, to_additive_mask(mask, query.dtype), 0.5, 0.4, mpu.Stream(_rng(), "a", split=True)
    )
    weights = (query @ key.mT * 0.5).masked_fill(~mask, -torch.inf).softmax(-1)
    theirs = (weights * _factors(weights)) @ value
    _same(ours, theirs, [query, key, value])


@pytest.mark.parametrize("causal", [True, False])
def test_documents_drop_weights_one_by_one(causal: bool) -> None:
    ids = torch.tensor([[1] * 90 + [2] * 70, [1] * 100 + [2] * 30 + [3] * 30])
    query, key, value = (torch.randn(2, 3, 160, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    pieces = pieces_of(Documents(ids, None, causal))
    assert pieces is not None and len(pieces.items) == 4, "the last two share a chunk"
    ours = dropout_by_document(query, key, value, pieces, 0.5, 0.4, mpu.Stream(_rng(), "a", split=True))
    sees = (ids[:, :, None] == ids[:, None])[:, None]
    sees = sees.tril() if causal else sees
    weights = (query @ key.mT * 0.5).masked_fill(~sees, -torch.inf).softmax(-1)
    theirs = (weights * _factors(weights)) @ value
    _same(ours, theirs, [query, key, value])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kept_values_are_divided_by_their_probability(dtype: torch.dtype) -> None:
    x = torch.rand(50_000, generator=torch.Generator().manual_seed(3)).to(dtype)
    dropped = mpu.Stream(mpu.RngStreams(), "test").drop(x, 0.1)
    kept = dropped != 0
    ratio = dropped[kept].double().sum() / x[kept].double().sum()
    assert abs(ratio * 0.9 - 1) < 1e-4  # a factor in bf16 would be off by 1.6e-3
