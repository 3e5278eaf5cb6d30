"""Random layers train as in one process, to 1e-10, in random layouts, schedules and layer partitions."""

from collections import defaultdict

import pytest
import torch

from tests.support import FULL, on_ranks

from .draws import draw
from .engines import remembered_groups, train

TOLERANCE = 1e-10


def _errors(numbers: list[int]) -> list[tuple[float, float]]:
    found = []
    with remembered_groups() as begin:
        for number in numbers:
            begin()
            d = draw(number)
            try:
                found.append(train("tds", d.case, d.stages, d.tensor, d.pipeline, torch.float64, d.replicas, d.cuts))
            except Exception as error:
                raise RuntimeError(f"in draw {number}: {d}") from error
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("numbers", [range(15), pytest.param(range(15, 300), marks=FULL)], ids=["15", "285 more"])
def test_drawn_layers_like_one_process(numbers: range) -> None:
    by_world: dict[int, list[int]] = defaultdict(list)
    for number in numbers:
        by_world[draw(number).world].append(number)
    bad = []
    for world, chosen in by_world.items():
        for rank, found in enumerate(on_ranks(world, _errors, chosen, timeout=800)):
            for number, (loss, weight) in zip(chosen, found, strict=True):
                if not max(loss, weight) <= TOLERANCE:
                    bad.append(f"rank {rank}, loss off by {loss:.1e}, weights by {weight:.1e}: {draw(number)}")
    assert not bad, "\n".join(bad)
