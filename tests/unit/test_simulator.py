"""The simulator against closed forms, a schedule's timetable, and cases small enough to do by hand."""

from functools import partial

import pytest

from megatron_tools.simulate.simulator import Costs, Machine, simulate
from tds.queues import Rules, finish
from tds.schedule import Plan, ScheduleError, gpipe, schedule_of
from tds.timetable import bubble, times

CASES = [
    ({}, 1), ({"extra_warmup": 1}, 1), ({"schedule": "gpipe"}, 1), ({"schedule": "zb-h1"}, 1), ({"schedule": "interleaved"}, 2),
]  # fmt: skip


def plan_of(settings: dict[str, object], stages: int, micros: int, chunks: int = 1) -> Plan:
    schedule = schedule_of(settings, chunks)
    return [list(schedule(stage, stages, micros)) for stage in range(stages)]


@pytest.mark.parametrize(("stages", "micros"), [(2, 4), (3, 6), (4, 8), (8, 16)])
def test_closed_forms(stages: int, micros: int) -> None:
    """Simulated bubbles equal closed forms for F = 1, B + W = 2.

    1f1b, gpipe and interleaved: Narayanan et al. 2021. ZB-H1: Qi et al. 2023.
    """
    wait = {"1f1b": 3.0, "gpipe": 3.0, "zb-h1": 1.0}
    for name, each in wait.items():
        found = simulate(plan_of({"schedule": name}, stages, micros))
        assert found.seconds == pytest.approx(3 * micros + (stages - 1) * each)
    found = simulate(plan_of({}, stages, micros))
    assert found.bubble == pytest.approx((stages - 1) / (micros + stages - 1))
    for chunks in (2, 3):
        costs = Costs(1 / chunks, 2 / chunks)
        found = simulate(plan_of({"schedule": "interleaved"}, stages, micros, chunks), costs)
        assert found.seconds == pytest.approx(3 * micros + (stages - 1) * 3 / chunks)


@pytest.mark.parametrize(("settings", "chunks"), CASES, ids=str)
@pytest.mark.parametrize("message", [0.0, 0.3])
def test_where_nothing_is_shared_it_is_the_timetable(settings: dict[str, object], chunks: int, message: float) -> None:
    plan = plan_of(settings, 4, 8, chunks)
    costs = Costs(1.0 / chunks, 2.2 / chunks, weight=0.9 / chunks)
    found = simulate(plan, costs, Machine(latency=message), steps=1)
    ours = {(s.stage, s.micro, s.chunk, s.kind): (s.begin, s.end) for s in found.spans}
    assert len(ours) == len(found.spans)
    theirs = times(plan, 1.0, 2.2, message, 0.9)
    # Spans of zb-h1 have separate kinds; in other schedules a backward pass is one span.
    for span in theirs:
        assert ours[span.stage, span.micro, span.chunk, span.kind] == pytest.approx((span.begin, span.end))
    assert len(ours) == len(theirs)
    assert found.bubble == pytest.approx(bubble(theirs))


def test_messages_on_one_link_take_turns() -> None:
    """Messages on one link take turns: two stages, gpipe of two, passes of 1, messages of 2 (10 bytes at 5 a second).

    Forward: F0 ends at 1, and its message leaves the link at 3; F1 ends at 2, waits until 3 and arrives at 5. Then B0
    of the last stage (1) ends at 7 after F1 (5 to 6), and its gradient arrives at 9. B1 ends at 8, waits until 9 and
    arrives at 11.
    """
    plan = plan_of({"schedule": "gpipe"}, 2, 2)
    found = simulate(plan, Costs(1.0, 1.0, message=10.0), Machine(bandwidth=5.0), steps=1)
    forward = sorted((m for m in found.messages if m.forward), key=lambda m: m.micro)
    assert [(m.asked, m.begin, m.end) for m in forward] == [(1.0, 1.0, 3.0), (2.0, 3.0, 5.0)]
    back = sorted((m for m in found.messages if not m.forward), key=lambda m: m.micro)
    assert [(m.asked, m.begin, m.end) for m in back] == [(7.0, 7.0, 9.0), (8.0, 9.0, 11.0)]
    assert found.seconds == 12.0
    # One shared wire for both directions changes nothing with two stages. With three it does, since two
    # boundaries compete.
    three = plan_of({"schedule": "gpipe"}, 3, 3)
    costs = Costs(1.0, 1.0, message=10.0)
    own, shared = (
        simulate(three, costs, Machine(bandwidth=5.0, link=link)).seconds
        for link in (lambda b, s, r: (b, r), lambda b, s, r: 0)
    )
    assert shared > own


def test_ranks_share_cores() -> None:
    """Four stages that share two cores take at least half of their total work, and little more."""
    plan = plan_of({}, 4, 16)
    alone = simulate(plan)
    two = simulate(plan, machine=Machine(rates=(1.0, 1.0, 2 / 3, 0.5)))
    assert alone.seconds == 3 * 19
    assert 3 * 16 * 4 / 2 <= two.seconds < 3 * 16 * 4 / 2 + 2 * 9
    one = simulate(plan, machine=Machine(rates=(1.0,)))
    assert one.seconds == pytest.approx(3 * 16 * 4)
    # Two ranks on a host with two cores do not slow each other down.
    assert simulate(plan, machine=Machine(rates=(1.0, 1.0), ranks_per_host=2)).seconds == pytest.approx(alone.seconds)


def test_replicas_wait_for_each_other_at_the_end_of_a_step() -> None:
    plan = plan_of({}, 2, 4)
    found = simulate(plan, Costs(reduce=0.5, optimizer=0.25), replicas=2)
    # After the last pass gradients are reduced for 0.5, and the optimizer runs for 0.25.
    assert found.seconds == pytest.approx(3 * 5 + 0.5 + 0.25)
    assert simulate(plan, machine=Machine(rates=(1.0,)), replicas=2).seconds == pytest.approx(2 * 2 * 4 * 3)


def test_a_slow_stage_and_jitter() -> None:
    plan = plan_of({}, 4, 32)
    slow = simulate(plan, machine=Machine(slow={2: 1.5}))
    # The slow stage waits for two forward passes at the start and two backward passes at the end. In between it
    # idles only once, while the next stage computes its first gradient.
    assert 32 * 4.5 + 2 * 1 + 2 * 2 <= slow.seconds <= 32 * 4.5 + 3 * 3
    jittered = [simulate(plan, machine=Machine(jitter=0.3, seed=seed)).seconds for seed in (1, 1, 2)]
    assert jittered[0] == jittered[1] != jittered[2]
    assert jittered[0] > simulate(plan).seconds


@pytest.mark.parametrize(("settings", "chunks"), CASES, ids=str)
def test_idle_time_has_reasons(settings: dict[str, object], chunks: int) -> None:
    found = simulate(plan_of(settings, 4, 8, chunks), machine=Machine(latency=0.1), steps=1)
    for stage, reasons in enumerate(found.idle):
        busy = sum(s.end - s.begin for s in found.spans if s.stage == stage)
        assert busy + sum(reasons.values()) == pytest.approx(found.seconds)
        assert ("first input" in reasons) == (stage > 0)
    assert found.idle[3].get("message", 0.0) >= 0.1


@pytest.mark.parametrize(("settings", "chunks"), CASES, ids=str)
def test_nccls_queues_cost_what_the_graph_of_queues_says(settings: dict[str, object], chunks: int) -> None:
    """Queues cost only waits for sends not yet received if messages take no time, as queues.py finds as well."""
    plan, rules = plan_of(settings, 4, 8, chunks), Rules(message=0.0)
    found = simulate(plan, Costs(1.0 / chunks, 2.0 / chunks), Machine(rules=rules), steps=1)
    assert found.seconds == pytest.approx(finish(plan, rules))


def test_a_circle_of_waiting_is_found() -> None:
    """A deadlock is found if one queue serves both directions, as queues.py proves."""
    plan = [list(partial(gpipe)(stage, 3, 4)) for stage in range(3)]
    crossed = [list(schedule_of({})(stage, 3, 4)) for stage in range(3)]
    one = Rules(queue=lambda border, stages, right: 0)
    with pytest.raises(ScheduleError, match="wait for each other for ever"):
        simulate(crossed, machine=Machine(rules=one))
    assert simulate(plan).seconds > 0
