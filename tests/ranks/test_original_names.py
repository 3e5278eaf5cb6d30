"""mpu functions that tutorials of Megatron-LM and CPM-Pretrain call work on 1 and 2 ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron import mpu
from tests.sentences import SENTENCES
from tests.support import on_ranks

RANKS = pytest.mark.parametrize("ranks", [1, 2])


def _places(ranks: int) -> None:
    assert mpu.is_unitialized()
    mpu.initialize_model_parallel(ranks)
    assert not mpu.is_unitialized()
    mpu.set_model_parallel_world_size(ranks)
    mpu.set_model_parallel_rank(dist.get_rank())
    with pytest.raises(RuntimeError, match=rf"world_size\(8\): the value is {ranks} in this run and cannot"):
        mpu.set_model_parallel_world_size(8)
    with pytest.raises(RuntimeError, match=r"set_model_parallel_rank\(7\)"):
        mpu.set_model_parallel_rank(7)
    whole = torch.arange(12.0).view(2, 6)
    parts = mpu.split_tensor_along_last_dim(whole, 3)
    assert [part.tolist() for part in parts] == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]
    assert parts[0].data_ptr() == whole.data_ptr() and not parts[0].is_contiguous()
    assert all(part.is_contiguous() for part in mpu.split_tensor_along_last_dim(whole, 3, contiguous_split_chunks=True))
    assert mpu.divide(6, 3) == 2
    for wrong in (lambda: mpu.divide(7, 2), lambda: mpu.split_tensor_along_last_dim(whole, 4)):
        with pytest.raises(ValueError, match=SENTENCES["cannot_be_divided_by_without_a"]):
            wrong()


@RANKS
def test_places_and_parts(ranks: int) -> None:
    on_ranks(ranks, _places, ranks)


def _norm(ranks: int) -> tuple[Tensor, Tensor]:
    mpu.initialize_model_parallel(ranks, options=mpu.Options(sequence_parallel=True))
    norm, plain = mpu.LayerNorm(6, eps=1e-6), nn.LayerNorm(6, eps=1e-6)
    assert (
        isinstance(norm, nn.LayerNorm)
        and norm.weight.spec.init_method is mpu.ones
        and norm.bias.spec.init_method is mpu.zeros
    )
    x = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0))
    own = mpu.scatter_to_sequence_parallel_region(x)
    (norm(own) ** 3).sum().backward()
    (plain(x) ** 3).sum().backward()
    torch.testing.assert_close(norm.weight.grad, plain.weight.grad)
    torch.testing.assert_close(norm.bias.grad, plain.bias.grad)


@RANKS
def test_layer_norm_sums_its_gradients_over_the_stretches(ranks: int) -> None:
    on_ranks(ranks, _norm, ranks)


def _draws(ranks: int) -> tuple[list[float], list[float], list[float]]:
    mpu.initialize_model_parallel(ranks)
    tracker = mpu.get_cuda_rng_tracker()
    with pytest.raises(RuntimeError, match=SENTENCES["leave_the_call_out"]):
        tracker.add("model-parallel-rng", 3)

    def draw() -> tuple[list[float], list[float]]:
        mpu.model_parallel_cuda_manual_seed(5)
        with tracker.fork():
            inside = torch.rand(3).tolist()
        return inside, torch.rand(3).tolist()

    once, again = draw(), draw()
    assert once == again
    torch.manual_seed(5)
    assert once[1] == torch.rand(3).tolist(), "draws within fork() must not change torch's default generator"
    mpu.model_parallel_cuda_manual_seed(6)
    with tracker.fork():
        other = torch.rand(3).tolist()
    return *once, other


@RANKS
def test_draws_inside_differ_by_rank_and_those_outside_agree(ranks: int) -> None:
    found = on_ranks(ranks, _draws, ranks)
    assert len({tuple(inside) for inside, _, _ in found}) == ranks
    assert len({tuple(outside) for _, outside, _ in found}) == 1
    assert all(inside != other for inside, _, other in found)


def _masks_of_a_stage(stages: int) -> list[float]:
    mpu.initialize_model_parallel(1, stages)
    with mpu.get_cuda_rng_tracker().fork():
        return torch.rand(3).tolist()


def test_stages_draw_from_streams_of_their_own() -> None:
    first, second = on_ranks(2, _masks_of_a_stage, 2)
    assert set(first).isdisjoint(second)


def _recomputed(ranks: int) -> None:
    mpu.initialize_model_parallel(ranks)
    layer = nn.Linear(4, 4)

    def block(x: Tensor) -> Tensor:
        x = torch.nn.functional.dropout(x, 0.5)  # this mask comes from torch's default generator
        with mpu.get_cuda_rng_tracker().fork():
            return torch.nn.functional.dropout(layer(x), 0.5)

    found = []
    for run in (block, lambda x: mpu.checkpoint(block, x)):
        mpu.model_parallel_cuda_manual_seed(5)
        x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
        y = run(x)
        torch.rand(10)
        with mpu.get_cuda_rng_tracker().fork():
            torch.rand(10)  # draws between forward pass and recomputation must not change the masks
        (y**2).sum().backward()
        found.append((y.tolist(), x.grad.tolist()))
    assert found[0] == found[1]


@RANKS
def test_checkpoint_draws_the_same_masks_again(ranks: int) -> None:
    on_ranks(ranks, _recomputed, ranks)


def _io(pipe: int, model: int) -> list[int] | None:
    mpu.initialize_model_parallel(model, pipe)
    mine = mpu.get_mesh()
    if pipe > 1 and mine.model.rank:
        with pytest.raises(RuntimeError, match=SENTENCES["reads_no_data_so_it_has"]):
            mpu.get_io_parallel_group()
        return None
    group = mpu.get_io_parallel_group()
    assert group is mpu.get_io_parallel_group()
    count = torch.ones(())
    dist.all_reduce(count, group=group)
    assert int(count) == dist.get_world_size(group)
    return dist.get_process_group_ranks(group)


@pytest.mark.parametrize(
    ("world", "pipe", "model", "expected"),
    [
        (1, 1, 1, [[0]]),
        (2, 1, 1, [[0, 1]] * 2),
        (2, 1, 2, [[0], [1]]),
        (2, 2, 1, [[0, 1]] * 2),
        (4, 2, 2, [[0, 2], None, [0, 2], None]),
    ],
)
def test_the_io_group_holds_those_that_read(
    world: int, pipe: int, model: int, expected: list[list[int] | None]
) -> None:
    assert on_ranks(world, _io, pipe, model) == expected
