from itertools import product

import pytest

from megatron.mpu import Topology
from tests.sentences import SENTENCES


@pytest.mark.parametrize("shape", list(product([1, 2, 3], repeat=3)), ids=str)
def test_same_answers_as_deepspeeds_own_topology(shape: tuple[int, int, int]) -> None:
    """`Topology` replaces DeepSpeed's PipeModelDataParallelTopology: its methods return the same results."""
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    pipe, data, model = shape
    ours, theirs = Topology(pipe, data, model), PipeModelDataParallelTopology(num_pp=pipe, num_mp=model, num_dp=data)
    assert ours.world_size() == theirs.world_size()
    assert ours.get_axis_names() == theirs.get_axis_names()
    for rank in range(ours.world_size()):
        coord, other = ours.get_coord(rank), theirs.get_coord(rank)
        assert (coord.pipe, coord.data, coord.model) == (other.pipe, other.data, other.model)
        assert ours.get_rank(**coord._asdict()) == rank
        assert ours.get_rank_repr(rank) == theirs.get_rank_repr(rank)
    for axis in ("pipe", "data", "model"):
        assert ours.get_dim(axis) == theirs.get_dim(axis)
        assert sorted(ours.get_axis_comm_lists(axis)) == sorted(theirs.get_axis_comm_lists(axis))
        assert ours.get_axis_list(axis, 0) == sorted(theirs.get_axis_list(axis, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Topology, "get_coord", None)  # a large grid has no time for the coordinates of all ranks
        assert ours.filter_match(pipe=0, data=data - 1) == sorted(theirs.filter_match(pipe=0, data=data - 1))


def test_lines_over_two_axes_hold_one_copy_of_the_model() -> None:
    assert Topology(pipe=2, data=2, model=2).lines("pipe", "model") == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_context_ranks_are_neighbours_on_the_data_axis() -> None:
    grid = Topology(pipe=2, data=4, model=2, context=2)
    assert grid.replicas == 2 and str(grid) == "pipe 2 x data 2 x context 2 x model 2"
    lines = [
        [grid.get_rank(pipe=p, data=d + i, model=m) for i in (0, 1)] for p in (0, 1) for d in (0, 2) for m in (0, 1)
    ]
    assert sorted(grid.consecutive_groups(grid.context)) == sorted(lines)
    assert str(Topology(2, 3, 1)) == "pipe 2 x data 3 x model 1"
    with pytest.raises(ValueError, match=SENTENCES["3_ranks_of_the_data_axis"]):
        Topology(data=3, context=2)


def test_places_outside_the_grid_are_refused() -> None:
    with pytest.raises(ValueError, match=SENTENCES["pipe_2_lies_outside"]):
        Topology(pipe=2).get_rank(pipe=2, data=0, model=0)
    with pytest.raises(ValueError, match=SENTENCES["rank_2_lies_outside"]):
        Topology(pipe=2).get_coord(2)
    with pytest.raises(ValueError, match=SENTENCES["data_axis_of_the_grid_has"]):
        Topology(data=0)
