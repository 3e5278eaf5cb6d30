"""Initial weights have the right defaults and are equal on any number of ranks; users' parameters stay unchanged."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.model.layer_stack import LayerStack
from megatron.model.layers import Layer
from megatron.mpu import parameters
from megatron.mpu.current import ParallelContext
from megatron.mpu.mesh import Axis, Mesh
from tds.pipe import LayerSpec, SequentialModule, TiedLayerSpec, seeded_layers


def _built(rank: int, ranks: int) -> dict[str, Tensor]:
    torch.manual_seed(3)
    axis = Axis(None, tuple(range(ranks)), rank)
    layers = {
        "embedding": mpu.VocabParallelEmbedding(50, 64, multiple=8, axis=axis),
        "column": mpu.ColumnParallelLinear(64, 96, axis=axis),
        "row": mpu.RowParallelLinear(96, 64, axis=axis, init_method=nn.init.xavier_normal_),
    }
    return {f"{key}.{name}": p.detach() for key, layer in layers.items() for name, p in layer.named_parameters()}


def test_layers_draw_their_own_values() -> None:
    values = _built(0, 1)
    for name, std in (("embedding", 0.02), ("column", 0.02), ("row", math.sqrt(2 / (64 + 96)))):
        weight = values[f"{name}.weight"][:50]
        assert weight.std().item() == pytest.approx(std, rel=0.1)
        assert abs(weight.mean().item()) < 0.2 * std
    assert not values["column.bias"].any() and not values["row.bias"].any()
    assert not values["embedding.weight"][50:].any(), "padding is zero"


@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_of_ranks_make_up_the_whole(ranks: int) -> None:
    whole, parts = _built(0, 1), [_built(rank, ranks) for rank in range(ranks)]
    for name, dim in (("embedding.weight", 0), ("column.weight", 0), ("row.weight", 1)):
        joined = torch.cat([part[name] for part in parts], dim)
        rows = 50 if "embedding" in name else whole[name].shape[dim]
        assert torch.equal(joined.narrow(dim, 0, rows), whole[name].narrow(dim, 0, rows))


def test_a_parameter_knows_its_part() -> None:
    """A sharded parameter knows which rows of the full weight it holds.

    With 10 rows on 4 ranks in shards of 4, rank 2 has two rows and padding, and rank 3 has only padding.
    """
    whole = torch.arange(30.0).view(10, 3)
    for rank, begin, end in ((0, 0, 4), (1, 4, 8), (2, 8, 10), (3, 10, 10)):
        axis = Axis(None, tuple(range(4)), rank)
        parameter = mpu.declare(nn.Parameter(torch.ones(4, 3)), mpu.zeros, dim=0, full_size=10, axis=axis)
        spec = mpu.spec_of(parameter)
        assert spec.rows == (0, begin, end) and spec.full_shape == (10, 3) and spec.split
        assert parameter.tensor_model_parallel and mpu.is_split(parameter), "the name that DeepSpeed reads"
        spec.put(whole, parameter)
        assert torch.equal(spec.without_padding(parameter.data.flatten()), whole[begin:end])
        assert torch.equal(spec.with_padding(whole[begin:end]), parameter)
        assert not parameter[end - begin :].any()


def test_a_sharded_dimension_lies_on_the_model_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    axis = Axis(None, tuple(range(4)), 2)
    monkeypatch.setattr(parameters, "parallel_context", lambda: ParallelContext(Mesh(model=axis)))
    parameter = mpu.declare(nn.Parameter(torch.ones(4, 3)), mpu.ones, dim=1)
    assert mpu.spec_of(parameter).rows == (1, 6, 9) and mpu.is_split(parameter)
    for copy in (mpu.declare(nn.Parameter(torch.ones(4, 3))), mpu.declare(parameter, dim=1, axis=mpu.TRIVIAL_AXIS)):
        assert not mpu.is_split(copy)


def test_a_negative_dimension_is_counted_from_the_end() -> None:
    axis = Axis(None, (0, 1), 1)
    for negative, dim, full_shape in ((-1, 1, (4, 6)), (-2, 0, (8, 3))):
        spec = mpu.spec_of(mpu.declare(nn.Parameter(torch.ones(4, 3)), dim=negative, axis=axis))
        assert (spec.dim, spec.rows.dim, spec.full_shape) == (dim, dim, full_shape)
    for shape, dim in (((4, 3), 2), ((4, 3), -3), ((), 0)):
        with pytest.raises(ValueError, match=f"dim {dim} "):
            mpu.declare(nn.Parameter(torch.ones(shape)), dim=dim, axis=axis)


def _filled(rank: int, ranks: int, dim: int, init_method: Any = parameters.NORMAL) -> tuple[Tensor, int]:
    """Initialise a rank's shard of a [200, 100] weight along `dim`; return the shard and the count of random draws."""
    shape = [200, 100]
    full = shape[dim]
    shape[dim] = -(-full // ranks)
    drawn = 0

    def counted(x: Tensor) -> None:
        nonlocal drawn
        drawn += x.numel()
        init_method(x)

    counted.func = nn.init.normal_  # type: ignore[attr-defined]
    with mpu.defer_init():
        parameter = nn.Parameter(torch.full(shape, 7.0))
        mpu.declare(parameter, counted, dim=dim, full_size=full, axis=Axis(None, tuple(range(ranks)), rank))
    mpu.spec_of(parameter).fill(parameter, 5)
    return parameter.detach(), drawn


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("at_once", [50, 1000, 1700, 10**6])
def test_a_rank_draws_its_own_rows(dim: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Initial weights are equal for any number of ranks; a rank draws its shard plus at most one block at each end."""
    monkeypatch.setattr(parameters, "BLOCK_ELEMENTS", at_once)
    whole, drawn = _filled(0, 1, dim)
    assert drawn == whole.numel()
    assert whole.std().item() == pytest.approx(0.02, rel=0.03) and abs(whole.mean().item()) < 1e-3
    assert len(whole.unique()) > 0.99 * whole.numel(), "no stretch repeats another"
    row = whole.numel() // whole.shape[dim]
    for ranks in (3, 7):
        parts = [_filled(rank, ranks, dim) for rank in range(ranks)]
        assert torch.equal(torch.cat([part for part, _ in parts], dim).narrow(dim, 0, whole.shape[dim]), whole)
        for part, drawn in parts:
            assert drawn <= part.numel() + 2 * max(at_once, row)


def test_what_looks_at_the_shape_is_drawn_for_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "BLOCK_ELEMENTS", 50)
    values = _built(0, 1)["row.weight"]
    torch.manual_seed(3)
    parameter = nn.Parameter(torch.empty(64, 96))
    with mpu.defer_init():
        mpu.declare(parameter, nn.init.xavier_normal_)
    mpu.spec_of(parameter).fill(parameter, 5)
    assert parameter.std().item() == pytest.approx(values.std().item(), rel=0.1)


def test_what_nobody_declared_is_a_copy_and_keeps_its_values() -> None:
    parameter = nn.Parameter(torch.ones(4, 3))
    spec = mpu.spec_of(parameter)
    spec.fill(parameter, 5)
    assert spec.rows == (0, 0, 4) and spec.full_shape == (4, 3) and not mpu.is_split(parameter)
    assert torch.equal(parameter, torch.ones(4, 3))
    parameter.model_parallel = True  # Megatron-LM's attribute for sharded weights
    assert mpu.is_split(parameter) and mpu.is_unique_param(parameter, 1)


class _Mixed(nn.Module):
    """A module with torch layers, a parameter without `mpu.declare`, and a tensor-parallel layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.embedding = nn.Linear(8, 8), nn.LayerNorm(8), nn.Embedding(5, 8)
        self.rms, self.factor = nn.RMSNorm(8), nn.Parameter(torch.tensor(3.0))
        self.ours = mpu.ColumnParallelLinear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_what_is_not_ours_is_left_alone_and_follows_the_seed() -> None:
    layers = [Layer(f"layers.{i}", _Mixed) for i in range(3)]
    first, again, other = (dict(LayerStack(layers, seed).named_parameters()) for seed in (5, 5, 6))
    for i in range(3):
        assert first[f"layers.{i}.factor"] == 3.0
        assert torch.equal(first[f"layers.{i}.norm.weight"], torch.ones(8))
        assert torch.equal(first[f"layers.{i}.rms.weight"], torch.ones(8))
        for name in ("linear.weight", "linear.bias", "embedding.weight", "ours.weight"):
            name = f"layers.{i}.{name}"
            assert first[name].count_nonzero() == first[name].numel()
            assert torch.equal(first[name], again[name])
            assert not torch.equal(first[name], other[name])
    alone = dict(LayerStack(layers[2:], 5).named_parameters())
    assert all(torch.equal(alone[name], first[name]) for name in alone), "it matters what was built before"


def _words(module: nn.Module, x: Tensor) -> Tensor:
    return x @ module.weight.T  # type: ignore[operator,union-attr]


def test_a_list_in_one_process_computes_ties_and_names_as_a_pipeline_does() -> None:
    specs = [
        TiedLayerSpec("words", nn.Embedding, 11, 8),
        LayerSpec(nn.Linear, 8, 8),
        torch.tanh,
        nn.Linear(8, 8),
        TiedLayerSpec("words", nn.Embedding, 11, 8, forward_fn=_words),
    ]
    torch.manual_seed(9)
    before = torch.get_rng_state()
    with seeded_layers(1):
        model = SequentialModule(specs)
    assert torch.equal(torch.get_rng_state(), before)
    weights = dict(model.named_parameters())
    assert sorted(weights) == ["1.bias", "1.weight", "3.bias", "3.weight", "tied_modules.words.weight"]
    words = torch.tensor([[1, 10]])
    table = weights["tied_modules.words.weight"]
    hidden = torch.tanh(table[words] @ weights["1.weight"].T + weights["1.bias"])
    hidden = hidden @ weights["3.weight"].T + weights["3.bias"]
    torch.testing.assert_close(model(words), hidden @ table.T)


def test_what_a_user_draws_after_ours_is_the_same_where_no_weight_is_drawn() -> None:
    """`mpu.skip_init` does not affect random numbers that are drawn after a tensor-parallel layer is built."""

    def buffer() -> Tensor:
        torch.manual_seed(3)
        mpu.ColumnParallelLinear(4, 4)
        return torch.randn(3)

    before = buffer()
    with mpu.skip_init():
        assert torch.equal(buffer(), before)
