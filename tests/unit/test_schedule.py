"""Schedules are data: everything about them is checked without a tensor."""

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
    gpipe,
    in_flight,
    one_forward_one_backward,
    schedule_of,
)
from tds.timetable import ScheduleError, bubble, check, most_in_flight, times

PARTNER = {SendActivation: (1, RecvActivation), SendGrad: (-1, RecvGrad)}
SETTINGS = [{}, {"extra_warmup": 1}, {"extra_warmup": 3}, {"schedule": "gpipe"}]


def plan_of(settings: dict[str, object], stages: int, micros: int) -> list[list[Instruction]]:
    schedule = schedule_of(settings)
    return [list(schedule(stage, stages, micros)) for stage in range(stages)]


def blocking_steps(plan: list[list[Instruction]]) -> int:
    """Run all stages with sends that end only when their receiver stands ready: the number of steps."""
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


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("micros", [1, 2, 3, 4, 5, 8, 16])
def test_every_micro_batch_goes_once_each_way_in_order_and_nobody_waits_for_ever(
    settings: dict[str, object], stages: int, micros: int
) -> None:
    plan = plan_of(settings, stages, micros)
    check(plan, micros)
    for instructions in plan:
        for kind in (Forward, Backward):
            assert [i.micro for i in instructions if type(i) is kind] == list(range(micros))


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("micros", range(1, 17))
def test_classic_1f1b_needs_no_more_than_blocking_sends_and_bounded_memory(stages: int, micros: int) -> None:
    plan = plan_of({}, stages, micros)
    blocking_steps(plan)
    assert [most_in_flight(stage) for stage in plan] == [min(stages - s, micros) for s in range(stages)]


@pytest.mark.parametrize("extra", [0, 1, 2])
def test_memory_is_what_in_flight_says(extra: int) -> None:
    plan = plan_of({"extra_warmup": extra}, 4, 16)
    assert [most_in_flight(stage) for stage in plan] == [in_flight(s, 4, 16, extra) for s in range(4)]
    assert [most_in_flight(stage) for stage in plan_of({"schedule": "gpipe"}, 4, 16)] == [16] * 4


@pytest.mark.parametrize("stages", range(1, 6))
@pytest.mark.parametrize("micros", [1, 4, 9])
@pytest.mark.parametrize("settings", [{}, {"schedule": "gpipe"}], ids=str)
def test_the_bubble_is_the_textbook_one(settings: dict[str, object], stages: int, micros: int) -> None:
    """(p - 1) / (m + p - 1), for both (Narayanan et al. 2021)."""
    assert bubble(times(plan_of(settings, stages, micros))) == pytest.approx((stages - 1) / (micros + stages - 1))


def test_extra_warmup_hides_messages() -> None:
    classic, eager = (bubble(times(plan_of({"extra_warmup": e}, 4, 16), message=0.3)) for e in (0, 1))
    assert eager < 0.85 * classic


@pytest.mark.parametrize("stages", range(1, 5))
def test_forward_only(stages: int) -> None:
    plan = [list(forward_only(stage, stages, 5)) for stage in range(stages)]
    check(plan, 5)
    blocking_steps(plan)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ([[Forward(0), SendActivation(0), RecvGrad(0), Backward(0)], [RecvActivation(0), Forward(0), Backward(0)]],
         r"stage 0 receives RecvGrad of \[0\], stage 1 sends \[\]"),
        ([[Forward(0), Forward(1), Backward(1)]], r"stage 0: Backward runs for \[1\], not once for each of 2"),
        ([[RecvGrad(0), Forward(0), SendActivation(0), Backward(0)], [RecvActivation(0), Forward(0), Backward(0), SendGrad(0)]],
         r"wait for each other for ever: stage 0 at RecvGrad\(0\), stage 1 at RecvActivation\(0\)"),
        ([[Forward(0), SendActivation(0), Forward(1), SendActivation(1)],
          [RecvActivation(1), Forward(1), RecvActivation(0), Forward(0)]], r"RecvActivation of \[1, 0\], stage 0 sends \[0, 1\]"),
    ],
)  # fmt: skip
def test_a_schedule_that_cannot_work_is_found(plan: list[list[Instruction]], message: str) -> None:
    micros = 1 + max(i.micro for stage in plan for i in stage)
    with pytest.raises(ScheduleError, match=message):
        check(plan, micros)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "zb"}, "no pipeline schedule 'zb'; there are 1f1b, gpipe"),
        ({"schedule": "gpipe", "extra_warmup": 1}, "extra_warmup 1 does not fit the schedule gpipe"),
        ({"extra_warmup": -1}, "extra_warmup -1"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule_of(settings)


def test_the_timetables_in_the_docstrings_are_what_runs() -> None:
    """The pictures are drawn from the generators: each pass takes one column."""
    for schedule in (one_forward_one_backward, gpipe):
        plan = [list(schedule(stage, 3, 4)) for stage in range(3)]
        rows = ["" for _ in plan]
        for span in sorted(times(plan, backward=1.0), key=lambda s: s.begin):
            label = f"{'B' if span.backward else 'F'}{span.micro} "
            rows[span.stage] = rows[span.stage].ljust(3 * round(span.begin)) + label
        for stage, row in enumerate(rows):
            assert f"stage {stage} | {row.rstrip()}" in (schedule.__doc__ or "")
