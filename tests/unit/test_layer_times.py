"""Layers are divided into pipeline stages by their measured seconds."""

import itertools
import random

from tds.layer_times import cut_by_time


def test_the_slowest_stretch_is_as_fast_as_can_be() -> None:
    """The slowest stage is as fast as possible; among such partitions, the sum of squared stage times is minimal."""
    rng = random.Random(1)
    for count in range(1, 9):
        for stretches in range(1, count + 1):
            seconds = [rng.random() for _ in range(count)]

            def slowest(cuts: list[int], seconds: list[float] = seconds) -> float:
                return max(sum(seconds[a:b]) for a, b in itertools.pairwise(cuts))

            found = cut_by_time(seconds, stretches)
            assert len(found) == stretches + 1
            ways = itertools.combinations(range(1, count), stretches - 1)
            every = [[0, *way, count] for way in ways]
            assert abs(slowest(found) - min(map(slowest, every))) < 1e-12

            def evenness(cuts: list[int], seconds: list[float] = seconds) -> float:
                return sum(sum(seconds[a:b]) ** 2 for a, b in itertools.pairwise(cuts))

            as_fast = [cuts for cuts in every if slowest(cuts) < slowest(found) + 1e-12]
            assert abs(evenness(found) - min(map(evenness, as_fast))) < 1e-12
