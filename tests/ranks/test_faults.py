"""If one rank of a pipeline raises, hangs or is killed, all ranks end soon; a report shows what each rank was doing."""

import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tds import fault_board, schedule
from tds.diagnose import Watchdog
from tests.support import End, covering, ends_of_ranks

STAGES, MICROS, TIMEOUT, TRIALS = 3, 4, 2.0, 30
INSTRUCTIONS = {
    0: ["Forward", "SendActivation", "RecvGrad", "Backward"],
    1: ["RecvActivation", "Forward", "SendActivation", "RecvGrad", "Backward", "SendGrad"],
    2: ["RecvActivation", "Forward", "Backward", "SendGrad"],
}


def _strike(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "raise":
        raise ArithmeticError("the layer broke")
    time.sleep(60)


def _train(kind: str, victim: int, instruction: str, micro: int) -> None:
    import tds

    torch.manual_seed(0)
    model = tds.PipelineModule(
        [nn.Linear(4, 4) for _ in range(STAGES)], num_stages=STAGES, loss_fn=nn.MSELoss(), partition_method="uniform"
    )
    config = {"train_batch_size": 2 * MICROS, "train_micro_batch_size_per_gpu": 2, "pipeline": {"timeout": TIMEOUT}}
    engine, *_ = tds.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)

    def batches(count: int) -> Iterator[Any]:
        for _ in range(count):
            yield torch.ones(2, 4), torch.zeros(2, 4)

    engine.train_batch(batches(MICROS))
    if engine.stage_id == victim and kind != "end":
        handler = engine._HANDLERS[getattr(schedule, instruction)]
        honest = getattr(engine, handler)

        def dishonest(due: schedule.Instruction) -> None:
            if due.micro == micro:
                _strike(kind)
            honest(due)

        setattr(engine, handler, dishonest)
    engine.train_batch(batches(MICROS - 1 if kind == "end" and engine.stage_id == victim else MICROS))
    engine.train_batch(batches(MICROS))  # ranks that finish the first step fail in this one


def check(ends: list[End], kind: str, victim: int, instruction: str, micro: int) -> None:
    words = "\n".join(f"[rank {r}] code {e.code} after {e.seconds:.1f} s\n{e.stderr}" for r, e in enumerate(ends))
    for rank, end in enumerate(ends):
        expected = -signal.SIGKILL if kind == "kill" and rank == victim else 1
        assert end.code == expected, words
        assert end.seconds < 30, words
    if kind == "kill" and victim == 0:
        assert all("pipeline stopped" in end.stderr for end in ends[1:]), words
        return
    report = ends[0].stderr
    assert "pipeline stopped: rank" in report, words
    for rank in range(STAGES):
        if kind == "kill" and rank == victim:
            assert f"--- rank {rank} does not answer" in report, words
            first = f"pipeline stopped: rank {victim} does not answer: its process is dead or stopped; rank "
            # The report begins either with a sentence about the killed rank or with the state of rank 0.
            assert report.startswith((first, "pipeline stopped: rank 0, stage")), words
        else:
            assert f"--- rank {rank}, stage {rank}, " in report, words
    if kind in ("raise", "sleep"):
        assert f"stage {victim}, in {instruction} of micro-batch {micro}" in report, words
        assert "_strike" in report, words
    if kind == "raise":
        assert f"rank {victim} raised ArithmeticError: the layer broke" in report, words
    if kind == "end":
        assert f"data iterator of stage {victim} ended after {MICROS - 1} of {MICROS}" in report, words


def trials() -> list[tuple[str, int, str, int]]:
    """Return test cases (kind of fault, rank, instruction, micro-batch); a fixed seed selects the micro-batches."""
    rng = random.Random(11)
    found: list[tuple[str, int, str, int]] = [("end", 0, "", 0), ("end", STAGES - 1, "", 0)]
    places = [(victim, name) for victim, names in INSTRUCTIONS.items() for name in names]
    for number in range(TRIALS - len(found)):
        kind = ("kill", "raise", "sleep")[number % 3]
        victim, name = places[(number // 3 + 5 * number) % len(places)]
        found.append((kind, victim, name, rng.randrange(MICROS)))
    return found


TRIED = list(dict.fromkeys(trials()))  # each trial once
ALWAYS = [*TRIED[:5], *TRIED[6:8]]  # one kill is enough: the other ranks wait for the longest until they notice it


@pytest.mark.parametrize("trial", covering(TRIED, ALWAYS.__contains__), ids=lambda t: "-".join(map(str, t)))
def test_all_ranks_end_with_a_report(trial: tuple[str, int, str, int]) -> None:
    check(ends_of_ranks(STAGES, _train, *trial, timeout=40), *trial)


def _wait_in_a_large_run(victim: int) -> None:
    """Wait as in a run with so many ranks that each rank except rank 0 asks for faults only every 7.5 seconds."""
    fault_board.RANKS_PER_TICK = dist.get_world_size() / 30  # type: ignore[assignment]
    fault_board.COLLECT_SECONDS = 1.5
    watchdog = Watchdog(60.0, None, "run")
    with watchdog.watching():
        watchdog.record("waiting")
        if dist.get_rank() == victim:
            raise ArithmeticError("the layer broke")
        time.sleep(60)


def test_a_fault_in_a_large_run_reaches_all_ranks() -> None:
    """Ranks that ask for faults seldom still learn of each fault, and the report waits for all of them."""
    ranks, victim = 6, 4
    ends = ends_of_ranks(ranks, _wait_in_a_large_run, victim, timeout=60)
    words = "\n".join(f"[rank {r}] code {e.code} after {e.seconds:.1f} s\n{e.stderr}" for r, e in enumerate(ends))
    assert [end.code for end in ends] == [1] * ranks, words
    report = ends[0].stderr
    assert report.startswith(f"run stopped: rank {victim} raised ArithmeticError: the layer broke"), words
    assert all(f"--- rank {rank}, waiting, for" in report for rank in range(ranks) if rank != victim), words
    assert "does not answer" not in report, words
