"""The charts of a report page as data, which page.js draws: metrics of the runs over their iterations."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from operator import mul
from typing import Any, NamedTuple

from .layers import EVEN, LINEAR, TITLES, titled, values_of
from .runs import Row, RunRead, named_splits

Runs = Sequence[RunRead]
Point = tuple[float, float | None]  # value and its place on the horizontal axis
Shape = dict[str, Any]  # a line, level or mark of a chart, as page.js reads it
MOST = 1500  # maximum number of points in a line; `thinned` shortens longer lines


class Chart(NamedTuple):
    """One chart.

    log: whether the vertical axis is logarithmic. lines: results of `line`. levels: horizontal lines for comparison,
    such as the unigram entropy. marks: iterations to highlight, such as jumps of the loss; those with "line" get a line
    and show their label.
    """

    name: str
    title: str
    unit: str
    log: bool
    lines: list[Shape]
    levels: list[Shape]
    marks: list[Shape]
    zero: bool = False  # whether the vertical axis starts at 0


def thinned(points: Sequence[Point]) -> list[Point]:
    """Reduce the points of a line to about MOST.

    The line is cut into ranges. From each range, the first, the last, the lowest and the highest point are kept.
    """
    if len(points) <= MOST:
        return list(points)

    def height(i: int) -> float:
        return points[i][1] or 0.0

    size = math.ceil(4 * len(points) / MOST)
    kept = []
    for begin in range(0, len(points), size):
        part = range(begin, min(begin + size, len(points)))
        known = [i for i in part if points[i][1] is not None]
        ends = {part[0], part[-1]}
        if known:
            ends |= {min(known, key=height), max(known, key=height)}
        kept += [points[i] for i in sorted(ends)]
    return kept


def line(run: int, label: str, kind: str, points: Iterable[Point]) -> Shape:
    """Return a line of a chart as a dict for page.js. NaN and infinite values become None, which interrupts the line.

    run: index of the run. kind: style of the line: `raw` (thin, for many points), `dots` and `squares` (with
    markers, for few points), `parts` (with a colour for each label instead of each run), `dashed` or `plain`.
    """
    finite = []
    for at, value in points:
        known = value is not None and math.isfinite(value)
        finite.append((at, value if known else None))
    x = []
    y = []
    for at, value in thinned(finite):
        x.append(at)
        y.append(None if value is None else float(f"{value:.6g}"))
    return {"run": run, "label": label, "kind": kind, "x": x, "y": y}


def _points(rows: Sequence[Row], key: str, scale: Callable[[float], float] = float) -> list[Point]:
    return [(row["iteration"], None if row[key] is None else scale(row[key])) for row in rows if key in row]


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0)) if math.isfinite(loss) else math.nan


def _learning(runs: Runs) -> list[Chart]:
    """Return the charts of losses, perplexity and accuracy."""
    loss: list[Shape] = []
    ppl: list[Shape] = []
    accuracy: list[Shape] = []
    levels: list[Shape] = []
    marks: list[Shape] = []
    for i, run in enumerate(runs):
        train = run.part("train")
        valid = run.part("valid")
        loss.append(line(i, "training", "raw", _points(train, "lm_loss")))
        loss.append(line(i, "validation", "dots", _points(valid, "lm_loss")))
        loss.append(line(i, "validation, masked text only", "dashed", _points(valid, "text_loss")))
        loss.append(line(i, "test", "squares", _points(run.part("test"), "lm_loss")))
        ppl.append(line(i, "training", "raw", _points(train, "lm_loss", _perplexity)))
        ppl.append(line(i, "validation", "dots", _points(valid, "lm_loss", _perplexity)))
        accuracy.append(line(i, "accuracy", "dots", _points(valid, "text_accuracy", partial(mul, 100))))
        for of, nats in run.baselines.items():
            levels.append({"run": i, "label": f"unigram entropy of the {of}", "y": round(nats, 4)})
        for row in train:
            marks += _spikes(i, row)
        marks += _last_nan(i, train)
    by_corpus = _by_split(runs, "lm_loss", 1, "train", "valid", "test")
    tasks = _by_split(runs, "accuracy", 100, "eval")
    shared = _once(levels, len(runs))
    of_ppl = [{**level, "y": float(f"{math.exp(level['y']):.5g}")} for level in shared]
    return [
        Chart("loss", "Loss", "nats per token", False, loss, shared, marks),
        Chart("corpora", "Loss by corpus", "nats per token", False, by_corpus, [], []),
        Chart("tasks", "Accuracy on --eval-tasks", "%", False, tasks, [], [], True),
        Chart("ppl", "Perplexity", "", True, ppl, of_ppl, []),
        Chart("accuracy", "Accuracy on masked text", "%", False, accuracy, [], [], True),
    ]


def _spikes(run: int, row: Row) -> Iterator[Shape]:
    """Yield a mark for each jump of the loss in a row of metrics.jsonl, and for each skipped step."""
    for spike in row.get("spikes", []):
        if spike.get("lm_loss") is not None:
            yield {"run": run, "x": spike["iteration"], "label": f"the loss jumped to {spike['lm_loss']:.3f}"}
    for spike in row.get("skipped_spikes", []):
        label = f"step skipped, {spike['name']} {spike['value']:.3f}"
        yield {"run": run, "x": spike["iteration"], "label": label}


def _last_nan(run: int, train: Sequence[Row]) -> list[Shape]:
    """Return a mark at the first log line from which on every loss is NaN, if the last loss is NaN."""
    nan = list(takewhile(lambda row: not math.isfinite(row["lm_loss"]), reversed(train)))
    marks = []
    for row in nan[-1:]:
        first = row["iteration"]
        label = f"NaN from iteration {first}"
        marks.append({"run": run, "x": first, "label": label, "line": True})
    return marks


def _by_split(runs: Runs, key: str, factor: float, *parts: str) -> list[Shape]:
    """Return a line of `key` times `factor` for each corpus or task of each run. parts: as for `named_splits`."""
    found = []
    for i, run in enumerate(runs):
        for split in named_splits(run.rows, *parts):
            found.append(line(i, split, "parts", _points(run.part(split), key, partial(mul, factor))))
    return found


def _once(levels: list[Shape], runs: int) -> list[Shape]:
    """Return the horizontal lines `levels`. A line that all runs have in common appears once, with None as its run."""
    alike: dict[tuple[str, float], list[Shape]] = {}
    for level in levels:
        alike.setdefault((level["label"], level["y"]), []).append(level)
    found: list[Shape] = []
    for same in alike.values():
        if len(same) == runs > 1:
            found.append({**same[0], "run": None})
        else:
            found += same
    return found


# Charts of training metrics: key in metrics.jsonl, title, unit, whether the axis is logarithmic, and the factor that
# converts a value to the unit.
OF_TRAINING = (
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
SHOWN_AT_ZERO = {"lr", "grad_norm", "tokens_per_second", "memory_mb"}


def _training(runs: Runs) -> list[Chart]:
    """Return the charts of OF_TRAINING that have values other than zero."""
    found = []
    for key, title, unit, log, factor in OF_TRAINING:
        lines = []
        shown = key in SHOWN_AT_ZERO
        for i, run in enumerate(runs):
            each = line(i, title.lower(), "plain", _points(run.part("train"), key, partial(mul, factor)))
            lines.append(each)
            shown = shown or any(each["y"])
        if shown:
            found.append(Chart(key, title, unit, log, lines, [], [], not log))
    return found


def _timers(runs: Runs) -> list[Chart]:
    """Return one chart per run, of the times of an iteration's parts. The chart is empty if the run logged no times."""
    found = []
    for i, run in enumerate(runs):
        rows = [row for row in run.part("train") if "timers_ms" in row]
        names: set[str] = set()
        for row in rows:
            names.update(row["timers_ms"])
        lines = []
        for name in sorted(names):
            points = [(row["iteration"], row["timers_ms"].get(name)) for row in rows]
            lines.append(line(i, name, "parts", points))
        title = titled("Parts of an iteration", run.name, runs)
        found.append(Chart(f"timers{i}", title, "ms", False, lines, [], [], True))
    return found


def _by_layer(runs: Runs) -> list[Chart]:
    """Return one chart per run and metric of layers, with a line for each layer."""
    found = []
    for i, run in enumerate(runs):
        for metric, iterations, layers, _ in values_of(run):
            lines = []
            for name, values in layers.items():
                lines.append(line(i, name, "parts", zip(iterations, values, strict=True)))
            levels = []
            if metric in EVEN:
                levels.append({"run": i, "label": "equal shares", "y": EVEN[metric]})
            title = titled(TITLES[metric], run.name, runs)
            found.append(Chart(f"{metric}{i}", title, "", metric not in LINEAR, lines, levels, []))
    return found


def charts(runs: Runs) -> list[Chart]:
    """Return all charts that have values to show."""
    found = []
    for chart in [*_learning(runs), *_training(runs), *_by_layer(runs), *_timers(runs)]:
        lines = [each for each in chart.lines if set(each["y"]) - {None}]
        if lines:
            found.append(chart._replace(lines=lines))
    return found
