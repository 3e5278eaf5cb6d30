"""Timetable of a traced iteration, with the ideal schedule of the same passes for comparison."""

import statistics
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from tds import timeline
from tds.schedule import Plan, find_schedule
from tds.timetable import PASSES, Span, bubble_fraction, simulate_times

from .drawing import KIND_NAMES, last_end
from .iterations import Iteration, iterations

# Sizes in pixels.
WIDTH = 900
HEIGHT = 30  # of a stage
LEFT = 64  # width of a stage's name


class Timetable(NamedTuple):
    """The timetable of one traced iteration of a run.

    chosen: this iteration. ideal: the ideal timetable of its passes, from `ideal_spans`. median_seconds: median
    time of an iteration. num_iterations: number of iterations in the trace.
    """

    stages: int
    schedule: str
    chosen: Iteration
    ideal: list[Span]
    median_seconds: float
    num_iterations: int

    def rows(self) -> dict[str, list[Span]]:
        """Return title -> passes, for the ideal and for the real timetable. The titles are shown above them."""
        ideal = last_end({"": self.ideal}) * 1e3
        real = last_end({"": self.chosen.spans}) * 1e3
        return {
            f"ideal {self.schedule} of the same passes: {ideal:.1f} ms, "
            f"bubble {bubble_fraction(self.ideal):.1%}": self.ideal,
            f"iteration {self.chosen.number}: {real:.1f} ms, bubble {self.chosen.bubble:.1%}": self.chosen.spans,
        }


def instructions_of(name: str, stages: int, micros: int, chunks: int, extra: int) -> Plan:
    """Return the schedule `name` as a list of instructions for each stage."""
    schedule = find_schedule({"schedule": name, "extra_warmup": extra}, chunks)
    return [list(schedule(stage, stages, micros)) for stage in range(stages)]


def timetable_of(ranks: Sequence[timeline.RankTrace], iteration: int | None = None) -> Timetable:
    """Return the timetable of `iteration`, or of the iteration with median time.

    ranks: traces from `timeline.read`. Raises ValueError if the iteration is missing.
    """
    found = iterations(ranks)
    if not found:
        raise ValueError("the timeline contains no iteration that is complete on all stages")
    median_seconds = statistics.median(each.seconds for each in found)
    chosen = min(found, key=lambda each: abs(each.seconds - median_seconds))
    if iteration is not None:
        by_number = {each.number: each for each in found}
        if iteration not in by_number:
            raise ValueError(
                f"--iteration {iteration} is not in the timeline, which has {found[0].number} to {found[-1].number}"
            )
        chosen = by_number[iteration]
    metadata = ranks[0].metadata
    return Timetable(
        metadata["stages"],
        metadata["schedule"],
        chosen,
        ideal_spans(metadata, chosen.spans),
        median_seconds,
        len(found),
    )


def ideal_spans(metadata: Mapping[str, Any], spans: Sequence[Span]) -> list[Span]:
    """Return the passes of the ideal timetable, in which a pass waits only for its inputs.

    Each pass takes the median time of the passes in `spans` that have the same kind, stage and chunk.
    metadata: stages, chunks, schedule and extra warmup, as each rank of the run recorded them.
    """
    stages = metadata["stages"]
    chunks = metadata["chunks"] if stages > 1 else 1
    # With --batch-size-schedule, an iteration may have fewer micro-batches than --gas. They are numbered from 0.
    micros = 1 + max(span.micro for span in spans)
    plan = instructions_of(metadata["schedule"], stages, micros, chunks, metadata["extra_warmup"])
    durations: dict[tuple[str, int, int], list[float]] = {}
    for span in spans:
        key = (span.kind, span.stage, span.chunk)
        durations.setdefault(key, []).append(span.end - span.begin)

    def median_duration(kind: Any, stage: int, chunk: int) -> float:
        # PASSES gives the letter of a pass, such as F for Forward. A pass that was not traced takes no time.
        key = (PASSES[kind], stage, chunk)
        return statistics.median(durations.get(key, [0.0]))

    return simulate_times(plan, seconds=median_duration)


def read_timetable(run_dir: Path) -> Timetable | None:
    """Return the timetable of a pipeline run, or None if the run has no pipeline or no readable timelines."""
    folder = run_dir / timeline.FOLDER
    try:
        ranks = timeline.read(folder)
        metadata = ranks[0].metadata
        has_stages = metadata["pipeline"] and metadata["stages"] > 1
        return timetable_of(ranks) if has_stages else None
    except (OSError, ValueError, KeyError):
        return None


def as_svg(table: Timetable) -> str:
    """Return an SVG with the ideal timetable above the real timetable, on the same time scale.

    The page's CSS classes define the colours.
    """
    rows = table.rows()
    stages = table.stages
    scale = (WIDTH - LEFT - 4) / last_end(rows)
    table_height = stages * HEIGHT + 32
    elements = [
        f'<svg class="timetable" viewBox="0 0 {WIDTH} {table_height * len(rows)}" width="{WIDTH}" role="img" '
        f'aria-label="{escape("; ".join(rows))}">',
    ]
    for row, (title, spans) in enumerate(rows.items()):
        top = row * table_height + 24
        elements.append(f'<text class="head" x="0" y="{top - 8}">{title}</text>')
        elements += [f'<text x="0" y="{top + stage * HEIGHT + 19}">stage {stage}</text>' for stage in range(stages)]
        elements += [_bar(span, scale, top + span.stage * HEIGHT + 2) for span in spans]
    return "".join([*elements, "</svg>"])


def _bar(span: Span, scale: float, y: int) -> str:
    """Return the SVG of one pass. scale: pixels per second. y: top of the stage's row."""
    x = LEFT + span.begin * scale
    w = (span.end - span.begin) * scale
    tooltip = (
        f"stage {span.stage}, micro-batch {span.micro}, {KIND_NAMES[span.kind]}: {(span.end - span.begin) * 1e3:.2f} ms"
    )
    number = f'<text class="in" x="{x + w / 2:.1f}" y="{y + 17}">{span.micro}</text>' if w > 14 else ""
    return (
        f'<g><title>{tooltip}</title><rect class="{span.kind}{span.chunk % 2}" x="{x:.1f}" y="{y}" '
        f'width="{max(w - 1, 0.6):.1f}" height="{HEIGHT - 5}" rx="3"/>{number}</g>'
    )
