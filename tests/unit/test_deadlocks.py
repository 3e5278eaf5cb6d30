"""Deadlocks of pipeline schedules under NCCL's message order are detected, and no built-in schedule has one."""

from collections.abc import Hashable
from functools import partial
from typing import Any

import pytest

from tds import other_schedules, schedule
from tds.deadlocks import Rules, refuse_deadlocks
from tds.posting import simulate_posting
from tds.queues import boundary_parity
from tds.schedule import MicroChunk, Plan, Schedule, ScheduleError
from tds.timetable import check_plan
from tests.sentences import SENTENCES
from tests.support import covering

SCHEDULES: dict[str, Schedule] = {
    "1f1b": schedule.one_forward_one_backward,
    "1f1b, extra_warmup 1": partial(schedule.one_forward_one_backward, extra_warmup=1),
    "1f1b, extra_warmup 2": partial(schedule.one_forward_one_backward, extra_warmup=2),
    "gpipe": other_schedules.gpipe,
    "interleaved": partial(other_schedules.interleaved, chunks=2),
    "interleaved 3": partial(other_schedules.interleaved, chunks=3),
    "zb-h1": other_schedules.zero_bubble,
    "evaluation": schedule.forward_only,
    "evaluation of chunks": partial(schedule.forward_only, chunks=2),
}
SYNCHRONIZING = Rules(ahead=None, one_hardware_queue=True, device_waits=True)


def plan_of(name: str, stages: int, micros: int) -> Plan:
    return [list(SCHEDULES[name](stage, stages, micros)) for stage in range(stages)]


@pytest.mark.slow
@pytest.mark.parametrize("stages", covering(range(2, 65), lambda n: n <= 7))
def test_every_schedule_ends_whatever_stands_in_queues(stages: int) -> None:
    for name in SCHEDULES:
        for micros in {1, stages + 1} if stages > 20 else {1, stages - 1, stages, stages + 1, 2 * stages + 1}:
            plan = plan_of(name, stages, micros)
            for dynamic in (False, True):
                refuse_deadlocks(plan, Rules(dynamic=dynamic))


@pytest.mark.slow
@pytest.mark.parametrize("stages", covering(range(2, 65), lambda n: n <= 7))
def test_every_schedule_ends_wherever_stages_synchronize_their_devices(stages: int) -> None:
    """No schedule deadlocks, even if all stages synchronize at every allocation and before every pass.

    All streams of a device share one hardware queue.
    """
    for name in SCHEDULES:
        for micros in {1, stages + 1} if stages > 20 else {1, stages - 1, stages, stages + 1, 2 * stages + 1}:
            plan = plan_of(name, stages, micros)
            for dynamic in (False, True):
                if not dynamic or ("interleaved" not in name and "chunks" not in name):
                    refuse_deadlocks(plan, SYNCHRONIZING._replace(dynamic=dynamic))


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_hardware_queue_is_enough(name: str) -> None:
    for stages in (2, 3, 4, 8):
        for micros in (1, stages, 2 * stages - 1, 4 * stages):
            refuse_deadlocks(plan_of(name, stages, micros), SYNCHRONIZING)


def test_chunks_with_a_header_for_each_message_are_refused() -> None:
    """Interleaving deadlocks if shapes depend on the data and both stages synchronize; the error names a stage."""
    with pytest.raises(ScheduleError, match=SENTENCES["stages_that_synchronize"]):
        refuse_deadlocks(plan_of("interleaved", 2, 4), Rules(ahead=None, device_waits=True, dynamic=True))


def test_a_receive_is_posted_when_its_message_can_have_been_sent() -> None:
    """In 1F1B on 2 stages, each receive is posted after as many passes as this timetable, made by hand, requires.

    A forward pass takes 1 unit of time, a backward pass 2.

    stage 0 | F0 F1       B0--- F2 B1--- B2---      (the columns are 1 apart)
    stage 1 |    F0 B0--- F1 B1--- F2 B2---
    """
    first, second = simulate_posting(plan_of("1f1b", 2, 3))
    # Gradients 0, 1 and 2 are sent after B0, B1 and B2 of stage 1, at times 4, 7 and 10.
    assert first[schedule.RecvGrad] == {MicroChunk(0): 2, MicroChunk(1): 4, MicroChunk(2): 5}
    # Activations 0, 1 and 2 are sent after F0, F1 and F2 of stage 0, at times 1, 2 and 7.
    assert second[schedule.RecvActivation] == {MicroChunk(0): 0, MicroChunk(1): 1, MicroChunk(2): 4}


@pytest.mark.parametrize("stages", range(2, 12))
def test_the_two_boundaries_of_a_stage_have_different_parities(stages: int) -> None:
    for stage in range(stages):
        assert boundary_parity(stage, stages) != boundary_parity((stage - 1) % stages, stages)
    assert {boundary_parity(border, stages) for border in range(stages - 1)} <= {0, 1}


# ------------------------------------------------ deadlocks are found


def one_group(border: int, stages: int, right: bool) -> Hashable:
    """Return the key of a message's queue: all stage boundaries share one queue per direction."""
    return right


def no_direction(border: int, stages: int, right: bool) -> Hashable:
    return boundary_parity(border, stages)


HANGS: list[tuple[str, int, dict[str, Any]]] = [
    ("1f1b", 3, {"queue": one_group}),
    ("zb-h1", 3, {"queue": one_group}),
    ("1f1b", 2, {"queue": no_direction}),
    ("interleaved", 4, {"queue": one_group}),
    ("1f1b", 4, {"one_hardware_queue": True}),
    ("interleaved", 4, {"ahead": 2, "one_hardware_queue": True}),
    ("1f1b, extra_warmup 2", 3, {"ahead": 0, "one_hardware_queue": True}),
    ("1f1b", 2, {"ahead": 0, "device_waits": True}),
    ("1f1b", 2, {"ahead": 1, "device_waits": True}),
    ("1f1b", 4, {"ahead": 2, "device_waits": True}),
]


@pytest.mark.parametrize(("name", "stages", "rules"), HANGS, ids=range(len(HANGS)))
def test_what_hangs_is_found(name: str, stages: int, rules: dict[str, Any]) -> None:
    plan = plan_of(name, stages, 8)
    for check in (refuse_deadlocks, partial(check_plan, micros=8)):
        with pytest.raises(ScheduleError, match=SENTENCES["messages_would_deadlock_which_waits_for"]):
            check(plan, rules=Rules(**rules))


def test_what_hangs_with_two_groups_does_not_with_two_stages() -> None:
    refuse_deadlocks(plan_of("1f1b", 2, 8), Rules(queue=one_group))
    refuse_deadlocks(plan_of("gpipe", 4, 8), Rules(queue=one_group))
