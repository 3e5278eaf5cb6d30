"""Cuts by measured time."""

import itertools
import random

from tds.layer_times import cut_by_time


def test_the_slowest_stretch_is_as_fast_as_can_be() -> None:
    """Against all ways to cut."""
    rng = random.Random(1)
    for count in range(1, 9):
        for stretches in range(1, count + 1):
            seconds = [rng.random() for _ in range(count)]

            def slowest(cuts: list[int], seconds: list[float] = seconds) -> float:
                return max(sum(seconds[a:b]) for a, b in itertools.pairwise(cuts))

            found = cut_by_time(seconds, stretches)
            assert len(found) == stretches + 1
            ways = itertools.combinations(range(1, count), stretches - 1)
            assert abs(slowest(found) - min(slowest([0, *way, count]) for way in ways)) < 1e-12
