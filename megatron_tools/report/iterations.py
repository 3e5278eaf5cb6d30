"""Conversion of the timelines that a run recorded to the pipeline schedules that it executed."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from tds.timeline import RankTrace
from tds.timetable import Span, bubble

LETTERS = {"Forward": "F", "Backward": "B", "BackwardInput": "B", "BackwardWeight": "W"}


class Iteration(NamedTuple):
    """The timeline of one iteration of one replica.

    seconds: time from the moment when the first of the stages begins the step to the moment when all have ended it.
    begin: seconds from the start of the training step to the start of the first pass.
    spans: the forward and backward passes; their times count from the start of the first pass.
    """

    number: int
    seconds: float
    begin: float
    spans: list[Span]

    @property
    def bubble(self) -> float:
        """Idle share of the stages' total time between the start of the first pass and the end of the last pass."""
        return bubble(self.spans)


def iterations(ranks: Sequence[RankTrace], replica: int = 0) -> list[Iteration]:
    """Return the training iterations that all stages of a replica recorded.

    Each stage is represented by its first model-parallel rank.
    """
    stages = {}
    for rank in ranks:
        if rank.about["replica"] == replica and rank.about["model"] == 0:
            stages[rank.about["stage"]] = rank
    count = next(iter(stages.values())).about["stages"] if stages else 1
    missing = set(range(count)) - stages.keys()
    if missing:
        raise ValueError(
            f"the timeline of stage {min(missing)} is missing: its rank wrote no timeline, or wrote it to another disk"
        )
    steps: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
    for stage, rank in stages.items():
        for e in rank.events:
            if e["cat"] == "step" and e["name"] == "train_batch":
                steps[e["args"]["iteration"]][stage] = e
    return [_iteration(n, found, stages) for n, found in sorted(steps.items()) if len(found) == len(stages)]


def _passes(rank: RankTrace, iteration: int) -> list[dict[str, Any]]:
    """Return the forward and backward passes of an iteration.

    A run without a pipeline does not record which micro-batch a pass belongs to, so this function numbers the passes.
    """
    if rank.about["pipeline"]:
        return list(rank.named(iteration, ["pass"]))
    found = []
    seen = Counter[str]()
    for e in rank.named(iteration, ["part"]):
        name = e["name"]
        if name in ("forward", "backward"):
            found.append({**e, "name": name.title(), "args": {"micro": seen[name], "chunk": 0}})
            seen[name] += 1
    return found


def _iteration(number: int, steps: dict[int, dict[str, Any]], stages: dict[int, RankTrace]) -> Iteration:
    """Return the timeline of one iteration. steps: stage -> event of its training step."""
    begin = min(step["ts"] for step in steps.values())
    end = max(step["ts"] + step["dur"] for step in steps.values())
    passes = []
    first = math.inf
    for stage, rank in stages.items():
        step = steps[stage]
        for e in _passes(rank, number):
            if step["ts"] <= e["ts"] <= step["ts"] + step["dur"]:
                passes.append((stage, e))
                first = min(first, e["ts"])
    if not passes:
        first = begin
    spans = []
    for stage, e in passes:
        at = (e["ts"] - first) / 1e6
        until = at + e["dur"] / 1e6
        place = e["args"]
        spans.append(Span(stage, place["micro"], place["chunk"], LETTERS[e["name"]], at, until))
    return Iteration(number, (end - begin) / 1e6, (first - begin) / 1e6, spans)
