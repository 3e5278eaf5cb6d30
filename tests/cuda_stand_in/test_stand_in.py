"""Tests of the stand-in for CUDA: its cases, its checks of recorded calls, and with --full all cases."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.config.command_line import parse
from megatron.config.defaults import DEFAULTS
from tests.support import FULL, command

from .build import Missing, library
from .cases import CASES
from .deadlocks import find_deadlock
from .runs import Materials, different_losses, problems_of, too_many_waits

PAIR = [0, 1]


@pytest.mark.parametrize("name", CASES)
def test_the_flags_of_a_case_are_valid(name: str) -> None:
    case = CASES[name]
    command = case.command("data", "tokenizer.model", "run")
    config = parse(command[1:], DEFAULTS[case.family], case.ranks)
    assert config.train.train_iters == 4
    for each in case.then:
        if each.startswith("--"):
            parse([*command[1:], *each.split()], DEFAULTS[case.family], case.ranks)


@pytest.fixture
def built() -> Path:
    """The path of the library; without a compiler, the test is skipped."""
    try:
        return library()
    except Missing as error:
        pytest.skip(str(error))


@FULL
@pytest.mark.parametrize("name", CASES)
def test_a_case(name: str, built: Path, tiny_data: str, vocab_file: str) -> None:
    assert problems_of(CASES[name], Materials(str(built), tiny_data, vocab_file)) == []


@FULL
def test_the_stand_in_counts_waits_and_refuses_mistakes(built: Path) -> None:
    done = command("python", "-m", "tests.cuda_stand_in.probes", str(built))
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    free = {"repeat_interleave of a known size", "computation", "assignment of a number by a mask"}
    free |= {"to the device, without blocking", "to pinned memory, without blocking"}
    assert {name for name, count in found["waits"].items() if not count} == free
    assert found["gradient"] == ["cuda:1", [2.0, 4.0]]
    assert "same device" in found["mixed"]
    assert found["refused"] == [
        "a tensor of the CPU in a group of NCCL",
        "a tensor on the device in a group of hosts",
        "a tensor [3, 2] that is not contiguous",
        "torch.int16",
        "RedOpType.BOR",
    ]


class Program:
    """The events of a rank, as nccl.Record has them."""

    def __init__(self) -> None:
        self.events: list[list[Any]] = []

    def call(
        self, *operations: tuple[str, int | None], group: str = "pair", ranks: Sequence[int] = PAIR, size: int = 4
    ) -> int:
        """Start operations (name, peer) as one call in a group of these ranks; return its number."""
        number = len(self.events)
        described = [[name, peer, f"float32 {size}"] for name, peer in operations]
        self.events.append(["call", number, group, ranks, described, f"line {number}"])
        return number

    def wait(self, number: int) -> None:
        self.events.append(["wait", number])


def exchanging(*first_names: str, batched: bool = False, size: int = 4) -> list[list[list[Any]]]:
    """Return the events of two ranks, each of which sends and receives, beginning with first_names[rank]."""
    programs = []
    for rank, first in enumerate(first_names):
        program = Program()
        second = "recv" if first == "send" else "send"
        operations = (first, 1 - rank), (second, 1 - rank)
        for call in [operations] if batched else [(each,) for each in operations]:
            program.wait(program.call(*call, size=size + rank * (size - 4)))
        programs.append(program.events)
    return programs


def test_messages_end_if_one_rank_receives_first() -> None:
    assert find_deadlock(exchanging("send", "recv")) == []


def test_two_ranks_that_both_send_first_deadlock() -> None:
    problems = find_deadlock(exchanging("send", "send"))
    assert problems == [f"never ends on NCCL: rank {rank}: send (rank {1 - rank}) at line 0" for rank in PAIR]


def test_the_operations_of_a_batch_run_at_the_same_time() -> None:
    assert find_deadlock(exchanging("send", "send", batched=True)) == []


def test_messages_of_other_sizes_do_not_fit() -> None:
    (problem,) = find_deadlock(exchanging("send", "recv", size=5))
    assert "float32 5 meets" in problem


def test_two_ranks_exchange_messages_while_a_third_waits_in_a_collective() -> None:
    programs = [Program(), Program(), Program()]
    for rank, name in ((0, "send"), (1, "recv")):
        programs[rank].wait(programs[rank].call((name, 1 - rank), ranks=[0, 1, 2]))
    for program in programs:
        program.wait(program.call(("all_reduce", None), ranks=[0, 1, 2]))
    assert find_deadlock([program.events for program in programs]) == []


def test_collectives_of_two_groups_deadlock_if_each_rank_waits_for_another() -> None:
    programs = [Program(), Program()]
    for program, groups in zip(programs, (("a", "b"), ("b", "a")), strict=True):
        for group in groups:
            program.wait(program.call(("all_reduce", None), group=group))
    assert len(find_deadlock([program.events for program in programs])) == 2
    unawaited = [[event for event in program.events if event[0] == "call"] for program in programs]
    assert find_deadlock(unawaited) == []


def test_collectives_of_one_group_must_be_the_same() -> None:
    programs = [Program(), Program()]
    for program, name in zip(programs, ("all_reduce", "broadcast"), strict=True):
        program.call((name, None))
    (problem,) = find_deadlock([program.events for program in programs])
    assert "meets rank 1: broadcast at line 0" in problem


def test_waits_are_counted_from_the_second_step() -> None:
    waits = [{"item at x.py:1": 5}, {"item at x.py:2": 1}, {"item at x.py:2 (deepspeed/y.py:3)": 2}]
    reports = [{"waits": waits}]
    assert too_many_waits(reports, 1, 2) == []
    assert too_many_waits(reports, 0, 2) == [
        "rank 0 waits in step 2 1 times in code of this project, 0 allowed: 1 x item at x.py:2"
    ]
    assert "in step 3 2 times in code of DeepSpeed, 1 allowed: 2 x item at x.py:2" in too_many_waits(reports, 1, 1)[0]


def test_losses_must_be_near_the_ones_of_the_cpu() -> None:
    expected = {("train", 1, "lm_loss"): 2.0}
    assert different_losses({("train", 1, "lm_loss"): 2.00004}, expected, 5e-5) == []
    assert different_losses({("train", 1, "lm_loss"): 2.001}, expected, 5e-5)
    assert different_losses({("train", 1, "lm_loss"): float("nan")}, expected, 5e-5)
    assert different_losses({}, expected, 5e-5)
    assert different_losses({}, {}, 5e-5)
