"""With every schedule and grid of stages and tensor-parallel ranks, each case trains like its layers in one process."""

import itertools
from typing import Any

import pytest
import torch

from tests.support import covering, on_ranks

from .cases import CASES, Case
from .engines import remembered_groups, train

SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "eager 1f1b": {"extra_warmup": 1},
    "gpipe": {"schedule": "gpipe"},
    "interleaved": {"schedule": "interleaved"},
    "zb-h1": {"schedule": "zb-h1"},
}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
Run = tuple[str, str, torch.dtype]  # (name of the case, name of the schedule, dtype)


def runs(stages: int, tensor: int, everything: bool) -> list[Run]:
    """Return the runs for a number of stages and of tensor-parallel ranks.

    everything: run all cases with all schedules. Otherwise, each case runs with one schedule, chosen in rotation. On
    2 x 2 ranks, only every fourth case runs.
    """

    found: list[Run] = []
    for number, case in enumerate(CASES):
        if (stages, tensor, everything) == (2, 2, False) and number % 4:
            continue
        if case.slow and not everything:
            continue
        own = [schedule for schedule in SCHEDULES if _fits(case, schedule, everything)]
        if not everything and (stages, tensor) == (3, 1):
            own = [own[number % len(own)]]
        elif not everything:
            differ = [schedule for schedule in own if stages > 1 and schedule in ("1f1b", "interleaved", "zb-h1")]
            own = [differ[(number + stages) % len(differ)]] if differ else own[:1]
        for schedule in own:
            # A case's first schedule runs in all its dtypes. For other schedules, more dtypes would only test rounding.
            several = schedule == own[0] and (everything or not (case.probe or case.config))
            found += [(case.name, schedule, dtype) for dtype in (case.only if several else case.only[:1])]
    return found


def _fits(case: Case, schedule: str, everything: bool) -> bool:
    """Return whether a case runs with a schedule.

    zb-h1 refuses recomputation. Unless `everything` is set, only 1f1b and interleaved run cases with a probe or a
    ds_config.
    """
    if case.checkpoint and schedule == "zb-h1":
        return False
    return everything or not (case.probe or case.config) or schedule in ("1f1b", "interleaved")


def _all(stages: int, tensor: int, chosen: list[Run]) -> list[tuple[float, float]]:
    named = {case.name: case for case in CASES}
    found = []
    with remembered_groups() as begin:
        for name, schedule, dtype in chosen:
            begin()
            try:
                found.append(train("tds", named[name], stages, tensor, SCHEDULES[schedule], dtype))
            except Exception as error:
                raise RuntimeError(f"in case {name!r} under {schedule}, {dtype}") from error
    return found


GRIDS = list(itertools.product([4, 3, 2, 1], [1, 2], [True, False]))
COVERING = [(2, 2, False)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "grid", covering(GRIDS, COVERING.__contains__), ids=lambda g: f"pp{g[0]}-tp{g[1]}-{'all' if g[2] else 'some'}"
)
def test_like_one_process(grid: tuple[int, int, bool]) -> None:
    """All cases have the losses and weights of one process in this grid of stages and tensor-parallel ranks."""
    stages, tensor, everything = grid
    bad, chosen = [], runs(stages, tensor, everything)
    for rank, found in enumerate(on_ranks(stages * tensor, _all, stages, tensor, chosen, timeout=900)):
        for (name, schedule, dtype), (loss, weight) in zip(chosen, found, strict=True):
            if not max(loss, weight) <= TOLERANCE[dtype]:
                bad.append(f"rank {rank}, {name}, {schedule}, {dtype}: loss off by {loss:.1e}, weights by {weight:.1e}")
    assert not bad, "\n".join(bad)
