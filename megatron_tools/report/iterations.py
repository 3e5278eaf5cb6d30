"""Conversion of the timelines that a run recorded to the pipeline schedules that it executed."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tds.timeline import RankTrace
from tds.timetable import Span, bubble_fraction

PASS_LETTERS = {"Forward": "F", "Backward": "B", "BackwardInput": "B", "BackwardWeight": "W"}


class Iteration(NamedTuple):
    """The timeline of one iteration of one replica.

    seconds: time from the moment when the first of the stages begins the step to the moment when all have ended it.
    spans: the forward and backward passes; their times count from the start of the first pass.
    """

    number: int
    seconds: float
    spans: list[Span]

    @property
    def bubble(self) -> float:
        """Idle share of the stages' total time between the start of the first pass and the end of the last pass."""
        return bubble_fraction(self.spans)


def iterations(ranks: Sequence[RankTrace]) -> list[Iteration]:
    """Return the training iterations that all stages of the first replica recorded.

    Each stage is represented by its first model-parallel rank.
    """
    stages = {}
    for rank in ranks:
        metadata = rank.metadata
        if metadata["replica"] == 0 and metadata["model"] == 0:
            stages[metadata["stage"]] = rank
    # Every rank recorded the number of stages.
    missing = set(range(ranks[0].metadata["stages"])) - stages.keys()
    if missing:
        raise ValueError(
            f"the timeline of stage {min(missing)} is missing: its rank wrote no timeline, or wrote it to another disk"
        )
    # Iteration -> stage -> event of the stage's training step.
    steps: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
    for stage, rank in stages.items():
        for event in rank.events:
            if event["cat"] == "step" and event["name"] == "train_batch":
                steps[event["args"]["iteration"]][stage] = event
    complete = []
    # The ranks write their files from time to time, so some stages may lack the newest iterations.
    for number, events_of_stages in sorted(steps.items()):
        if len(events_of_stages) == len(stages):
            complete.append(_iteration(number, events_of_stages, stages))
    return complete


def _passes(rank: RankTrace, iteration: int) -> Iterator[dict[str, Any]]:
    """Yield the forward and backward passes of an iteration.

    A run without a pipeline does not record which micro-batch a pass belongs to, so this function numbers the passes.
    """
    if rank.metadata["pipeline"]:
        yield from rank.spans(iteration, ["pass"])
        return
    counts = Counter[str]()
    for event in rank.spans(iteration, ["part"]):
        name = event["name"]
        if name in ("forward", "backward"):
            # The events get the form of those of a pipeline, such as Forward with micro-batch 0 of chunk 0.
            yield {**event, "name": name.title(), "args": {"micro": counts[name], "chunk": 0}}
            counts[name] += 1


def _iteration(number: int, steps: dict[int, dict[str, Any]], stages: dict[int, RankTrace]) -> Iteration:
    """Return the timeline of one iteration. steps: stage -> event of its training step."""
    # ts and dur are the begin and the duration of an event in microseconds.
    step_begin = min(step["ts"] for step in steps.values())
    step_end = max(step["ts"] + step["dur"] for step in steps.values())
    stage_passes = []
    for stage, rank in stages.items():
        step = steps[stage]
        for event in _passes(rank, number):
            # An evaluation after the training step has passes of the same iteration, which do not count here.
            if step["ts"] <= event["ts"] <= step["ts"] + step["dur"]:
                stage_passes.append((stage, event))
    first_start = min((event["ts"] for _, event in stage_passes), default=step_begin)
    spans = []
    for stage, event in stage_passes:
        begin_seconds = (event["ts"] - first_start) / 1e6
        end_seconds = begin_seconds + event["dur"] / 1e6
        pass_args = event["args"]
        spans.append(
            Span(stage, pass_args["micro"], pass_args["chunk"], PASS_LETTERS[event["name"]], begin_seconds, end_seconds)
        )
    return Iteration(number, (step_end - step_begin) / 1e6, spans)
