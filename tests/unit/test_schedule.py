"""Properties of pipeline schedules, checked on their lists of instructions, without tensors."""

from dataclasses import fields

import pytest

from megatron.config import ParallelConfig
from megatron.config.command_line import parse
from megatron.config.fields import ConfigError
from megatron.estimate.sizes import StageSchedule, in_flight
from tds.other_schedules import gpipe, zero_bubble
from tds.schedule import (
    BUILT_IN,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
    find_schedule,
    forward_only,
    one_forward_one_backward,
    register,
    with_messages,
)
from tds.timetable import ScheduleError, bubble_fraction, check_plan, max_in_flight, simulate_times
from tests.sentences import SENTENCES

SETTINGS: list[tuple[dict[str, object], int]] = [
    ({}, 1),
    ({"extra_warmup": 1}, 1),
    ({"extra_warmup": 3}, 1),
    ({"schedule": "gpipe"}, 1),
    ({"schedule": "zb-h1"}, 1),
    ({"schedule": "interleaved"}, 2),
    ({"schedule": "interleaved"}, 3),
]


def plan_of(settings: dict[str, object], stages: int, micros: int, chunks: int = 1) -> list[list[Instruction]]:
    schedule = find_schedule(settings, chunks)
    return [list(schedule(stage, stages, micros)) for stage in range(stages)]


def run_like_nccl(plan: list[list[Instruction]]) -> None:
    """Run all stages with the message order of gloo and NCCL; fail on a deadlock or a wrong message.

    Messages over a stage boundary have no tags. A receive takes the oldest message, so the expected one must be oldest.
    """
    stages, todo = len(plan), [list(stage) for stage in plan]
    wires: dict[tuple[str, int], list[int]] = {}  # (direction, virtual stage before the boundary) -> sent messages
    while any(todo):
        moved = False
        for stage, rest in enumerate(todo):
            while rest:
                head = rest[0]
                place = head.chunk * stages + stage
                if isinstance(head, (RecvActivation, RecvGrad)):
                    wire = wires.setdefault(
                        ("down", place - 1) if isinstance(head, RecvActivation) else ("up", place), []
                    )
                    if not wire:
                        break
                    assert wire.pop(0) == head.micro
                elif isinstance(head, (SendActivation, SendGrad)):
                    key = ("down", place) if isinstance(head, SendActivation) else ("up", place - 1)
                    wires.setdefault(key, []).append(head.micro)
                rest.pop(0)
                moved = True
        assert moved, f"deadlock: {[instructions[:1] for instructions in todo]}"
    assert not any(wires.values()), "a message that nobody receives"


def test_the_flag_offers_every_schedule() -> None:
    """--pipeline-schedule accepts exactly the names of tds' built-in schedules."""
    (setting,) = [each for each in fields(ParallelConfig) if each.name == "pipeline_schedule"]
    assert setting.metadata["check"].choices == BUILT_IN


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "chunks"), SETTINGS, ids=str)
@pytest.mark.parametrize("stages", range(1, 9))
def test_every_micro_batch_goes_once_each_way_in_order_and_nobody_waits_for_ever(
    settings: dict[str, object], chunks: int, stages: int
) -> None:
    for micros in sorted({1, 2, 3, stages, stages + 1, 2 * stages, 2 * stages + 1}):
        plan = plan_of(settings, stages, micros, chunks)
        check_plan(plan, micros)
        run_like_nccl(plan)
        for instructions in plan:
            for kind in (Forward, (Backward, BackwardWeight)):
                for chunk in range(chunks):
                    done = [i.micro for i in instructions if isinstance(i, kind) and i.chunk == chunk]
                    assert done == list(range(micros))


@pytest.mark.parametrize("stages", range(1, 9))
def test_memory_of_1f1b_and_of_zb_h1_is_bounded_by_the_stages(stages: int) -> None:
    for micros in range(1, 17):
        assert [max_in_flight(s) for s in plan_of({}, stages, micros)] == [
            min(stages - s, micros) for s in range(stages)
        ]
        assert all(max_in_flight(s) <= stages for s in plan_of({"schedule": "zb-h1"}, stages, micros))


@pytest.mark.parametrize("extra", [0, 1, 2])
def test_extra_warmup_costs_the_memory_that_its_docstring_says(extra: int) -> None:
    plan = plan_of({"extra_warmup": extra}, 4, 16)
    assert [max_in_flight(stage) for stage in plan] == [(4 - 1 - s) * (1 + extra) + 1 for s in range(4)]
    assert [max_in_flight(stage) for stage in plan_of({"schedule": "gpipe"}, 4, 16)] == [16] * 4


@pytest.mark.parametrize("stages", range(1, 6))
@pytest.mark.parametrize("micros", [1, 4, 9])
@pytest.mark.parametrize("settings", [{}, {"schedule": "gpipe"}], ids=str)
def test_the_bubble_is_the_textbook_one(settings: dict[str, object], stages: int, micros: int) -> None:
    """1f1b and gpipe on p stages with m micro-batches have the bubble (p - 1) / (m + p - 1), as in Narayanan et al."""
    assert bubble_fraction(simulate_times(plan_of(settings, stages, micros))) == pytest.approx(
        (stages - 1) / (micros + stages - 1)
    )


@pytest.mark.parametrize("stages", range(2, 9))
def test_the_smaller_bubbles_are_the_textbook_ones(stages: int) -> None:
    """The idle times of interleaving and ZB-H1 are those of their papers.

    Interleaved: 1F1B's idle time / chunks per stage (Narayanan et al. 2021). ZB-H1: (p - 1)(F + B - W), for p
    stages and the times F of a forward pass, B of input gradients and W of weight gradients (Qi et al. 2023).
    """

    def idle(settings: dict[str, object], chunks: int = 1) -> float:
        micros = 2 * stages
        spans = simulate_times(plan_of(settings, stages, micros, chunks), forward=1.0, backward=2.5, weight=1.0)
        return max(span.end for span in spans) - micros * 3.5

    assert idle({}) == pytest.approx((stages - 1) * 3.5)
    assert idle({"schedule": "interleaved"}, 2) == pytest.approx((stages - 1) * 3.5 / 2)
    assert idle({"schedule": "interleaved"}, 4) == pytest.approx((stages - 1) * 3.5 / 4)
    assert idle({"schedule": "zb-h1"}) == pytest.approx((stages - 1) * (1.0 + 1.5 - 1.0))


def test_extra_warmup_hides_messages() -> None:
    classic, eager = (bubble_fraction(simulate_times(plan_of({"extra_warmup": e}, 4, 16), message=0.3)) for e in (0, 1))
    assert eager < 0.85 * classic


@pytest.mark.parametrize("stages", range(1, 5))
def test_forward_only(stages: int) -> None:
    for chunks in (1, 2):
        plan = [list(forward_only(stage, stages, 5, chunks)) for stage in range(stages)]
        check_plan(plan, 5)
        run_like_nccl(plan)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            [[Forward(0), SendActivation(0), RecvGrad(0), Backward(0)], [RecvActivation(0), Forward(0), Backward(0)]],
            "stage 1: chunk 0 has 0 SendGrad instructions instead of 1",
        ),
        ([[Forward(0), Forward(1), Backward(1)]], r"stage 0: Backward\(1\) of chunk 0 is out of order"),
        ([[Forward(0), Forward(1), Backward(0)]], "stage 0: chunk 0 has 1 Backward instructions instead of 2"),
        ([[Forward(0), SendGrad(0), Backward(0)]], "stage 0: chunk 0 has 1 SendGrad instructions instead of 0"),
        (
            [
                [RecvGrad(0), Forward(0), SendActivation(0), Backward(0)],
                [RecvActivation(0), Forward(0), Backward(0), SendGrad(0)],
            ],
            r"the stages deadlock: stage 0 at RecvGrad\(0\), stage 1 at RecvActivation\(0\)",
        ),
        (
            [
                [Forward(0), SendActivation(0), Forward(1), SendActivation(1)],
                [RecvActivation(1), Forward(1), RecvActivation(0), Forward(0)],
            ],
            r"RecvActivation\(1\) of chunk 0 is out of order",
        ),
        (
            [
                [Forward(0), SendActivation(0), RecvGrad(0), Backward(0)],
                [RecvActivation(0), Backward(0), SendGrad(0), Forward(0)],
            ],
            r"stage 1: Backward\(0\) of chunk 0 is out of order",
        ),
        (
            [
                [Forward(0), SendActivation(0), RecvGrad(0), Backward(0)],
                [RecvActivation(0), Forward(0), SendGrad(0), Backward(0)],
            ],
            r"stage 1: SendGrad\(0\) of chunk 0 is out of order",
        ),
        (
            [
                [Forward(0), SendActivation(0), RecvGrad(0), Backward(0)],
                [Forward(0), RecvActivation(0), Backward(0), SendGrad(0)],
            ],
            r"stage 1: Forward\(0\) of chunk 0 is out of order",
        ),
        (
            [
                [Forward(0), SendActivation(0), BackwardInput(0), RecvGrad(0), BackwardWeight(0)],
                [RecvActivation(0), Forward(0), BackwardInput(0), SendGrad(0), BackwardWeight(0)],
            ],
            r"stage 0: BackwardInput\(0\) of chunk 0 is out of order",
        ),
    ],
)
def test_a_schedule_that_cannot_work_is_found(plan: list[list[Instruction]], message: str) -> None:
    micros = 1 + max(i.micro for stage in plan for i in stage)
    with pytest.raises(ScheduleError, match=message):
        check_plan(plan, micros)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "zb"}, "no pipeline schedule 'zb'; choose one of 1f1b, gpipe, interleaved, zb-h1"),
        ({"schedule": "gpipe", "extra_warmup": 1}, "extra_warmup 1 is not supported by the schedule gpipe"),
        ({"extra_warmup": -1}, "extra_warmup -1"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_schedule(settings)


def test_a_schedule_that_mixes_whole_and_split_backward_passes_is_refused() -> None:
    def mixed(stage: int, stages: int, micros: int) -> list[Instruction]:
        order = [Forward(0), Forward(1), Backward(0), BackwardInput(1), BackwardWeight(1)]
        return list(with_messages(order, stage, stages))

    for stages in (1, 2):
        with pytest.raises(ScheduleError, match="both Backward and BackwardInput"):
            check_plan([mixed(stage, stages, 2) for stage in range(stages)], 2)


def test_the_flag_takes_a_registered_schedule() -> None:
    """--pipeline-schedule takes the name of a registered schedule and refuses recomputation with split passes."""
    with pytest.raises(ConfigError, match="tds.schedule.register"):
        parse(["--pipeline-schedule", "unheard-of"])
    register("like zb-h1", zero_bubble)
    register("like gpipe", gpipe)
    flags = ["--pipe-parallel-size", "2", "--gas", "4", "--pipeline-schedule"]
    assert parse([*flags, "like zb-h1"]).parallel.splits_backward(4)
    assert not parse([*flags, "like gpipe", "--checkpoint-activations"]).parallel.splits_backward(4)
    for recomputes in ("--checkpoint-activations", "--checkpoint-attention"):
        with pytest.raises(ConfigError, match="like zb-h1 would recompute"):
            parse([*flags, "like zb-h1", recomputes])
    assert in_flight(StageSchedule("like gpipe", 0, 1, 0, 2, 64)) == 64, "a custom schedule may keep every micro-batch"


@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaved_keeps_as_many_micro_batches_as_the_page_says(chunks: int) -> None:
    """docs/tds.md: at most g + (2p - 1 - g) / chunks, where g is the size of the largest group, and at most m."""
    for stages in range(2, 6):
        for micros in range(1, 4 * stages + 1):
            plan = plan_of({"schedule": "interleaved"}, stages, micros, chunks)
            kept = max(map(max_in_flight, plan))  # passes through one of the chunks
            group = -(-micros // (micros // stages)) if micros >= stages else micros
            bound = (chunks - 1) * group + 2 * stages - 1
            assert kept <= min(bound, chunks * micros)
            if micros % stages == 0 and micros > stages:
                assert kept == chunks * stages + stages - 1


def test_chunks_need_the_schedule_for_them() -> None:
    with pytest.raises(ValueError, match=SENTENCES["a_model_with_2_chunks_a_2"]):
        find_schedule({"schedule": "gpipe"}, 2)


def test_the_timetables_in_the_docstrings_are_what_runs() -> None:
    """The timetables in the docstrings of tds/schedule.py are those that the schedules produce."""
    for schedule in (one_forward_one_backward, gpipe, zero_bubble):
        plan = [list(schedule(stage, 3, 4)) for stage in range(3)]
        rows = ["" for _ in plan]
        unit = 2.0 if schedule is zero_bubble else 1.0
        for span in sorted(simulate_times(plan, backward=unit), key=lambda s: s.begin):
            rows[span.stage] = rows[span.stage].ljust(3 * round(span.begin)) + f"{span.kind}{span.micro} "
        for stage, row in enumerate(rows):
            assert f"stage {stage} | {row.rstrip()}" in (schedule.__doc__ or "")
