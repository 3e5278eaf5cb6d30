"""Functions of whole matrices: each tensor-parallel rank gets its shard of the result of one process."""

import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.optim.whole_matrices import apply_per_matrix, apply_to_whole_matrices, matrix_work
from tests.support import on_ranks

SHAPES = [  # (o, i, sharded dimension, fused rows)
    (12, 5, 0, None),
    (6, 9, 1, None),
    (18, 4, 0, mpu.FusedRows((1, 1, 1), 2)),
    (24, 4, 0, mpu.FusedRows((2, 1, 1), 3)),  # a shard holds parts of a group
    (12, 6, 0, mpu.FusedRows((1, 1), 1)),
    (7, 3, None, None),
]


def _function(x: Tensor) -> Tensor:
    return x / x.norm() + x.sum()  # depends on the whole matrix


def _body(ranks: int) -> None:
    axis = mpu.initialize_model_parallel(ranks).model
    torch.manual_seed(0)
    shards, specs, expected = [], [], []
    for rows, columns, dim, fused in SHAPES:
        whole = torch.randn(rows, columns, dtype=torch.float64)
        shard = whole if dim is None else whole.chunk(ranks, dim)[axis.rank]
        spec = mpu.spec_of(mpu.declare(nn.Parameter(shard.clone()), dim=dim, axis=axis))
        spec.fused = fused
        assert spec.full_shape == whole.shape
        parts = [whole] if fused is None else fused.split(whole)
        wanted = [_function(part.reshape(-1, columns)).view(part.shape) for part in parts]
        result = wanted[0] if fused is None else torch.cat(wanted, 1).view(whole.shape)
        assert torch.equal(apply_per_matrix(_function, whole, spec), result)
        expected.append(result if dim is None else result.chunk(ranks, dim)[axis.rank])
        shards.append(shard)
        specs.append(spec)
        assert matrix_work(spec) > 0
    for some in (range(len(SHAPES)), [0], [3], [5], [4, 1], []):  # with one matrix, some ranks compute nothing
        found = apply_to_whole_matrices(_function, [shards[at] for at in some], [specs[at] for at in some], axis)
        assert all(torch.equal(each, expected[at]) for each, at in zip(found, some, strict=True))


def test_shards_of_results_are_those_of_one_process() -> None:
    on_ranks(3, _body, 3)
