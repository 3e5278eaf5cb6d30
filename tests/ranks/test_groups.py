"""A few calls create all process groups, with the same ranks as the groups that DeepSpeed would create."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tds
from megatron.config.command_line import parse
from megatron.model import GPT2ModelPipe
from megatron.mpu import Topology
from megatron.ranks.initialize import initialize_megatron
from tds import groups
from tds._torch import urgent_options
from tests.sentences import SENTENCES
from tests.support import command, on_ranks

FLAGS = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 64 --batch-size 2 --gas 2 "
    "--precision fp32 --pipe-parallel-size {} --model-parallel-size {}"
)


URGENT = "options with a high priority"


@pytest.mark.parametrize("shape", [(2, 3, 2), (4, 1, 2), (1, 4, 1), (3, 2, 1)])
def test_lines_like_one(shape: tuple[int, int, int]) -> None:
    """Given one process group of an axis, `parallel_groups` returns all groups of this axis.

    Given the group of two stages that share a weight, it returns all groups of such stages.
    """
    grid = Topology(*shape)
    for varying in (("pipe",), ("data",), ("model",), ("pipe", "model"), ()):
        lines = grid.lines(*varying)
        assert sorted(rank for line in lines for rank in line) == list(range(grid.world_size()))
        for line in lines:
            assert sorted(groups.parallel_groups(line, grid)) == sorted(lines)
    if shape[0] > 2:
        ends = [[grid.get_rank(pipe=p, data=d, model=m) for p in (0, shape[0] - 1)]
                for d in range(shape[1]) for m in range(shape[2])]  # fmt: skip
        assert sorted(groups.parallel_groups(ends[-1], grid)) == sorted(ends)


def test_lines_of_a_large_grid_are_arithmetic() -> None:
    grid = Topology(16, 64, 8)
    assert len(grid.lines("pipe")) == 512 and len(grid.lines("model")) == 1024
    assert grid.lines("data")[9] == grid.filter_match(pipe=1, model=1)
    assert grid.filter_match(pipe=16) == []
    with pytest.raises(ValueError, match=SENTENCES["the_grid_has_no_axis_pipes"]):
        grid.filter_match(pipes=1)


def _start(stages: int, model: int, splitting: bool) -> tuple[int, int, Any, list[Any]]:
    """Initialise a pipeline; return (calls of new_group, calls of split_group, groups of DeepSpeed's engine).

    Each group is given by its list of ranks, and by a bit mask of the ranks that took part in an all-reduce over it.
    The fourth result lists the ranks of the groups that were created for urgent messages.
    splitting: emulate torch's split_group, which gloo lacks.
    """
    one_by_one, at_once, urgent, honest = [0], [0], list[Any](), dist.new_group

    def new_group(*args: Any, **kwargs: Any) -> Any:
        one_by_one[0] += 1
        return honest(*args, **kwargs)

    def split_group(split_ranks: list[list[int]], pg_options: Any) -> Any:
        """Emulate torch's split_group, in which each rank may be in at most one group."""
        at_once[0] += 1
        if pg_options == URGENT:
            urgent.append(sorted(sorted(line) for line in split_ranks))
        assert len({rank for line in split_ranks for rank in line}) == sum(map(len, split_ranks))
        made = [honest(line) for line in split_ranks]
        return next((group for group, line in zip(made, split_ranks, strict=True) if dist.get_rank() in line), None)

    config = parse(FLAGS.format(stages, model).split())
    tds.init_distributed()
    dist.new_group = new_group
    if splitting:
        dist.split_group, groups.can_split_world = split_group, lambda: True
        groups.urgent_options = lambda world, device: URGENT
    initialize_megatron(config)
    pipe = GPT2ModelPipe(config)
    engine, *_ = tds.initialize(
        model=pipe, optimizer=torch.optim.SGD(pipe.parameters(), 0.1),
        config={"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "train_batch_size": 4 * (
            dist.get_world_size() // stages // model), "steps_per_print": 10**9},
    )  # fmt: skip
    grid, found = engine.grid, []
    for group in (grid.ds_model_proc_group, grid.dp_proc_group, grid.pp_proc_group, grid.slice_proc_group):
        number = torch.tensor([float(1 << dist.get_rank())])
        dist.all_reduce(number, group=group)
        found.append((dist.get_process_group_ranks(group), number.item()))
    ties = [dist.get_process_group_ranks(each["group"]) for each in pipe.tied_comms.values()]
    return one_by_one[0], at_once[0], (found, ties), urgent


@pytest.mark.parametrize(("stages", "model"), [(2, 2), (4, 1)])
def test_one_collective_an_axis(stages: int, model: int) -> None:
    """One call of torch's split_group creates all groups of an axis, with the same ranks as one call for each group."""
    world = 2 * stages * model
    plain, split = (on_ranks(world, _start, stages, model, splitting) for splitting in (False, True))
    grid = Topology(stages, 2, model)
    for rank, (by_hand, cut) in enumerate(zip(plain, split, strict=True)):
        assert by_hand[2] == cut[2]
        assert by_hand[1] == 0 and cut[1] <= 12 and cut[0] <= 2, (by_hand[:2], cut[:2])
        lines = {axis: sorted(map(sorted, grid.lines(axis))) for axis in ("pipe", "model")}
        # Stage boundaries have two groups on gloo, one for each direction.
        assert cut[3] == [*([lines["model"]] if model > 1 else []), lines["pipe"], lines["pipe"]] and not by_hand[3]
        at = grid.get_coord(rank)
        ranks, sums = zip(*cut[2][0], strict=True)
        assert list(ranks) == [
            grid.filter_match(data=at.data), grid.filter_match(pipe=at.pipe, model=at.model),
            grid.filter_match(data=at.data, model=at.model), grid.filter_match(pipe=at.pipe, data=at.data),
        ]  # fmt: skip
        assert list(sums) == [sum(1 << each for each in line) for line in ranks]
        ends = [grid.get_rank(pipe=p, data=at.data, model=at.model) for p in (0, stages - 1)]
        assert cut[2][1] == ([ends] if at.pipe in (0, stages - 1) else [])


def test_the_start_of_a_thousand_ranks() -> None:
    """One rank of 1,024, the others being simulated, creates its groups in at most 11 calls and starts in a minute."""
    flags = ["--json", "--ranks", "1024", "--rank", "517", "--stages", "16", "--model", "8", "--context", "4"]
    done = command("python", "benchmarks/many_ranks.py", *flags, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    # The members of this rank's pipeline create one more group, for tensors in host memory.
    assert (found["one by one"], found["stage"], found["layers"]) == (1, 8, 2)
    assert found["at once"] <= 11  # calls of split_group, including one for context parallelism
    assert found["grid"] + found["model"] + found["engine"] < 60


def test_urgent_options_are_a_copy_with_a_high_priority() -> None:
    """`urgent_options` changes one option of the world's group, in a copy; gloo's options have no priority."""
    honest = SimpleNamespace(is_high_priority_stream=False, _timeout=7)
    world = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=honest))
    found = urgent_options(world, torch.device("cuda"))
    assert (found.is_high_priority_stream, found._timeout) == (True, 7) and not honest.is_high_priority_stream
    world = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=SimpleNamespace(_timeout=7)))
    assert urgent_options(world, torch.device("cpu")) is None
