"""The charts of a report page as data, which page.js draws: metrics of the runs over their iterations."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import mul
from typing import Any, NamedTuple

from .layers import EVEN_VALUES, LINEAR_METRICS, METRIC_TITLES, layer_values, title_with_run
from .runs import Row, RunData, named_splits

Runs = Sequence[RunData]
Point = tuple[float, float | None]  # value and its place on the horizontal axis
Shape = dict[str, Any]  # a line, level or mark of a chart, as page.js reads it
Shapes = list[Shape]
MAX_POINTS = 1500  # maximum number of points in a line; `thin_out` shortens longer lines


class Chart(NamedTuple):
    """One chart.

    log: whether the vertical axis is logarithmic. lines: results of `chart_line`. levels: horizontal lines to
    compare with, such as the unigram entropy. marks: iterations to highlight, such as jumps of the loss; those with
    "line" get a line and show their label.
    """

    name: str
    title: str
    unit: str
    log: bool
    lines: Shapes
    levels: Sequence[Shape] = ()
    marks: Sequence[Shape] = ()
    zero: bool = False  # whether the vertical axis starts at 0


def thin_out(points: Sequence[Point]) -> list[Point]:
    """Reduce the points of a line to about MAX_POINTS.

    The line is cut into ranges. From each range, the first, the last, the lowest and the highest point are kept.
    """
    count = len(points)
    if count <= MAX_POINTS:
        return list(points)

    def value_at(i: int) -> float:
        return points[i][1] or 0.0  # only called for points whose value is not None

    # Up to four points of each range are kept, so there are MAX_POINTS / 4 ranges.
    size = math.ceil(4 * count / MAX_POINTS)
    kept = []
    for begin in range(0, count, size):
        indices = range(begin, min(begin + size, count))
        known = [i for i in indices if points[i][1] is not None]
        chosen = {indices[0], indices[-1]}  # a set, because a point may be chosen for two reasons
        if known:
            chosen.add(min(known, key=value_at))
            chosen.add(max(known, key=value_at))
        kept += [points[i] for i in sorted(chosen)]
    return kept


def chart_line(run: int, label: str, kind: str, points: Iterable[Point]) -> Shape:
    """Return a line of a chart as a dict for page.js. NaN and infinite values become None, which interrupts the line.

    run: index of the run. kind: style of the line: `raw` (thin, for many points), `dots` and `squares` (with
    markers, for few points), `parts` (with a colour for each label instead of each run), `dashed` or `plain`.
    """
    finite = []
    for place, value in points:
        is_known = value is not None and math.isfinite(value)
        finite.append((place, value if is_known else None))
    places = []
    values = []
    for place, value in thin_out(finite):
        places.append(place)
        values.append(None if value is None else float(f"{value:.6g}"))
    return {"run": run, "label": label, "kind": kind, "x": places, "y": values}


def _points(rows: Sequence[Row], key: str, scale: Callable[[float], float] = float) -> list[Point]:
    return [(row["iteration"], None if row[key] is None else scale(row[key])) for row in rows if key in row]


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0)) if math.isfinite(loss) else math.nan  # exp(710) overflows


def _loss_charts(runs: Runs) -> list[Chart]:
    """Return the charts of losses, perplexity and accuracy."""
    loss = Shapes()
    perplexity = Shapes()
    accuracy = Shapes()
    levels = Shapes()
    marks = Shapes()
    for index, run in enumerate(runs):
        train = run.trained
        valid = run.rows_of("valid")
        test = run.rows_of("test")
        loss += [
            chart_line(index, "training", "raw", _points(train, "lm_loss")),
            chart_line(index, "validation", "dots", _points(valid, "lm_loss")),
            chart_line(index, "validation, masked text only", "dashed", _points(valid, "text_loss")),
            chart_line(index, "test", "squares", _points(test, "lm_loss")),
        ]
        perplexity += [
            chart_line(index, "training", "raw", _points(train, "lm_loss", _perplexity)),
            chart_line(index, "validation", "dots", _points(valid, "lm_loss", _perplexity)),
        ]
        percentages = _points(valid, "text_accuracy", partial(mul, 100))
        accuracy.append(chart_line(index, "accuracy", "dots", percentages))
        for text_name, nats in run.baselines.items():
            levels.append({"run": index, "label": f"unigram entropy of the {text_name}", "y": round(nats, 4)})
        for row in train:
            marks += _spike_marks(index, row)
        marks += _nan_marks(index, train)  # at most one: the iteration from which on all losses are NaN
    by_corpus = _split_lines(runs, "lm_loss", 1, "train", "valid", "test")  # in nats, as logged
    tasks = _split_lines(runs, "accuracy", 100, "eval")  # logged shares as percentages
    shared_levels = _merge_shared_levels(levels, len(runs))
    ppl_levels = []  # the same levels as perplexities, with 5 digits
    for level in shared_levels:
        level_ppl = float(f"{math.exp(level['y']):.5g}")
        ppl_levels.append({**level, "y": level_ppl})
    return [
        # name, title, unit, whether the axis is logarithmic, lines, levels, marks
        Chart("loss", "Loss", "nats per token", False, loss, shared_levels, marks),
        Chart("corpora", "Loss by corpus", "nats per token", False, by_corpus),
        Chart("tasks", "Accuracy on --eval-tasks", "%", False, tasks, zero=True),
        Chart("ppl", "Perplexity", "", True, perplexity, ppl_levels),
        Chart("accuracy", "Accuracy on masked text", "%", False, accuracy, zero=True),
    ]


def _spike_marks(run: int, row: Row) -> Iterator[Shape]:
    """Yield a mark for each jump of the loss in a row of metrics.jsonl, and for each skipped step."""
    for spike in row.get("spikes", []):
        if spike.get("lm_loss") is not None:
            label = f"the loss jumped to {spike['lm_loss']:.3f}"
            yield {"run": run, "x": spike["iteration"], "label": label}
    for spike in row.get("skipped_spikes", []):
        label = f"step skipped, {spike['name']} {spike['value']:.3f}"
        yield {"run": run, "x": spike["iteration"], "label": label}


def _nan_marks(run: int, train: Sequence[Row]) -> Shapes:
    """Return a mark at the first log line from which on every loss is NaN, if the last loss is NaN."""
    # From the last row back to the last finite loss: `first` ends as the iteration of the row after it.
    first = None
    for row in reversed(train):
        if math.isfinite(row["lm_loss"]):
            break
        first = row["iteration"]
    if first is None:  # the last loss is finite, or there are no rows
        return []
    return [{"run": run, "x": first, "label": f"NaN from iteration {first}", "line": True}]


def _split_lines(runs: Runs, key: str, factor: float, *parts: str) -> Shapes:
    """Return a line of `key` times `factor` for each corpus or task of each run. parts: as for `named_splits`."""
    lines = []
    for index, run in enumerate(runs):
        for split in named_splits(run.rows, *parts):
            points = _points(run.rows_of(split), key, partial(mul, factor))
            lines.append(chart_line(index, split, "parts", points))
    return lines


def _merge_shared_levels(levels: Shapes, runs: int) -> Shapes:
    """Return the horizontal lines `levels`. A line that all runs have in common appears once, with None as its run."""
    groups: dict[tuple[str, float], Shapes] = {}
    for level in levels:
        # Levels with equal text and value are the same line.
        groups.setdefault((level["label"], level["y"]), []).append(level)
    merged = Shapes()
    for group in groups.values():
        # There are several runs, and each has this level.
        if len(group) == runs > 1:
            merged.append({**group[0], "run": None})
        else:
            merged += group
    return merged


# Charts of training metrics: key in metrics.jsonl, title, unit, whether the axis is logarithmic, and the factor that
# converts a value to the unit.
TRAINING_METRICS = (
    ("lr", "Learning rate", "", False, 1.0),
    ("grad_norm", "Gradient norm", "", True, 1.0),
    ("tokens_per_second", "Speed", "tokens/s", False, 1.0),
    ("tflops", "Speed of a rank", "TFLOP/s", False, 1.0),
    ("mfu", "Model FLOPs utilisation", "%", False, 100.0),
    ("memory_mb", "Memory of rank 0", "GB", False, 1e-3),
    ("loss_scale", "Loss scale", "", True, 1.0),
    ("skipped_steps", "Skipped steps", "", False, 1.0),
    ("z_loss", "z-loss", "", True, 1.0),
    ("router_loss", "Loss of the routers", "", True, 1.0),
)
SHOWN_IF_ZERO = {"lr", "grad_norm", "tokens_per_second", "memory_mb"}


def _training_charts(runs: Runs) -> Iterator[Chart]:
    """Yield the charts of TRAINING_METRICS that have values other than zero."""
    for key, title, unit, log, factor in TRAINING_METRICS:
        lines = []
        shown = key in SHOWN_IF_ZERO
        for index, run in enumerate(runs):
            points = _points(run.rows_of("train"), key, partial(mul, factor))
            line = chart_line(index, title.lower(), "plain", points)
            lines.append(line)
            # A metric such as the z-loss is 0 or None in runs that do not use it, and then has no chart.
            shown = shown or any(line["y"])
        if shown:
            yield Chart(key, title, unit, log, lines, zero=not log)


def _timer_charts(runs: Runs) -> Iterator[Chart]:
    """Yield one chart per run, of the times of an iteration's parts. The chart is empty if the run logged no times."""
    for index, run in enumerate(runs):
        rows = [row for row in run.rows_of("train") if "timers_ms" in row]
        names: set[str] = set()
        for row in rows:
            names.update(row["timers_ms"])
        lines = []
        for name in sorted(names):
            points = [(row["iteration"], row["timers_ms"].get(name)) for row in rows]
            lines.append(chart_line(index, name, "parts", points))
        title = title_with_run("Parts of an iteration", run.name, runs)
        yield Chart(f"timers{index}", title, "ms", False, lines, zero=True)


def _layer_charts(runs: Runs) -> Iterator[Chart]:
    """Yield one chart per run and metric of layers, with a line for each layer."""
    for index, run in enumerate(runs):
        for metric, iterations, layers, _ in layer_values(run):
            lines = []
            for name, values in layers.items():
                lines.append(chart_line(index, name, "parts", zip(iterations, values, strict=True)))
            levels = []
            if metric in EVEN_VALUES:
                levels.append({"run": index, "label": "equal shares", "y": EVEN_VALUES[metric]})
            title = title_with_run(METRIC_TITLES[metric], run.name, runs)
            log = metric not in LINEAR_METRICS
            yield Chart(f"{metric}{index}", title, "", log, lines, levels)


def all_charts(runs: Runs) -> list[Chart]:
    """Return all charts that have values to show."""
    charts = [*_loss_charts(runs), *_training_charts(runs), *_layer_charts(runs), *_timer_charts(runs)]
    shown = []
    for chart in charts:
        # Keep the lines that have at least one value.
        lines = [metric_line for metric_line in chart.lines if set(metric_line["y"]) - {None}]
        if lines:
            shown.append(chart._replace(lines=lines))
    return shown
