"""Schedules are data: they can be run by a simulator that knows nothing but blocking sends."""

import pytest

from tds.schedule import (
    Backward,
    Forward,
    Instruction,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
    forward_only,
    in_flight,
    one_forward_one_backward,
)

PARTNER = {SendActivation: (1, RecvActivation), SendGrad: (-1, RecvGrad)}


def simulate(plan: list[list[Instruction]]) -> int:
    """Run all stages; a send ends only when its receiver stands ready. Returns the number of steps."""
    todo, steps = [list(stage) for stage in plan], 0
    while any(todo):
        moving: set[int] = set()
        for stage, instructions in enumerate(todo):
            if not instructions or isinstance(instructions[0], (RecvActivation, RecvGrad)):
                continue
            head = instructions[0]
            if type(head) in PARTNER:
                hop, kind = PARTNER[type(head)]
                other = todo[stage + hop]
                if other and type(other[0]) is kind and other[0].micro == head.micro:
                    moving |= {stage, stage + hop}
            else:
                moving.add(stage)
        assert moving, f"deadlock: {[instructions[:1] for instructions in todo]}"
        for stage in moving:
            todo[stage].pop(0)
        steps += 1
    return steps


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("micros", range(1, 17))
def test_1f1b_neither_deadlocks_nor_forgets_nor_hoards(stages: int, micros: int) -> None:
    plan = [list(one_forward_one_backward(stage, stages, micros)) for stage in range(stages)]
    simulate(plan)
    for stage, instructions in enumerate(plan):
        for kind in (Forward, Backward):
            assert [i.micro for i in instructions if type(i) is kind] == list(range(micros))
        alive = most = 0
        for each in instructions:
            alive += (type(each) is Forward) - (type(each) is Backward)
            most = max(most, alive)
        assert most == in_flight(stage, stages, micros)


@pytest.mark.parametrize("stages", range(1, 5))
def test_forward_only(stages: int) -> None:
    plan = [list(forward_only(stage, stages, 5)) for stage in range(stages)]
    simulate(plan)
    assert all([i.micro for i in stage if type(i) is Forward] == list(range(5)) for stage in plan)


def test_the_simulator_finds_a_deadlock() -> None:
    """The order one writes first: the next activation before the gradient."""
    plan = [[Forward(0), SendActivation(0), SendActivation(1)], [RecvActivation(0), SendGrad(0), RecvActivation(1)]]
    with pytest.raises(AssertionError, match="deadlock"):
        simulate(plan)
