"""A self-contained HTML page about runs: Python writes text and tables, page.js draws charts from embedded data."""

import html
import json
import time
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from . import facts
from .curves import Chart, charts
from .differences import Setting, settings
from .layers import sections, titled
from .runs import RunRead
from .timetable import Timetable, as_svg

Runs = Sequence[RunRead]
COLOURS = 8  # number of run colours in page.css


def escape(text: object) -> str:
    """Return text escaped for HTML."""
    return html.escape(str(text))


def as_data(content: Any) -> str:
    """Return `content` as JSON that is safe inside a script element."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def page(
    runs: Runs,
    parameters: Sequence[int | None],
    timetables: Mapping[int, Timetable],
) -> str:
    """Return the HTML of the whole page.

    parameters: number of parameters of each run's model, None if unknown. timetables: index in `runs` -> timetable.
    """
    here = resources.files("megatron_tools.report")
    style, script = (here.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    names = " · ".join(run.name for run in runs)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(names)}</title><style>{style}</style></head><body>"
        f'<main id="page">{_body(runs, parameters, timetables)}</main>'
        '<noscript><p class="note">The curves need JavaScript; the tables are complete without it.</p></noscript>'
        f'<div id="tip" hidden></div><script>{script}</script></body></html>\n'
    )


def _body(
    runs: Runs,
    parameters: Sequence[int | None],
    timetables: Mapping[int, Timetable],
) -> str:
    """Return the page's content, without its head and scripts."""
    names = []
    given = []
    columns = []
    for run, count in zip(runs, parameters, strict=True):
        names.append(run.name)
        given.append(run.given)
        columns.append([*facts.results(run), *facts.machine(run, count)])
    at = time.strftime("%Y-%m-%d %H:%M")
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs"
    parts = [
        f'<header><h1>{escape(title)}</h1><span class="when">{at}</span>'
        '<button id="theme" title="light or dark" aria-label="light or dark">◐</button></header>',
        _cards(runs),
        _controls(),
        _figures(runs, charts(runs)),
        _table("Results", names, facts.table(columns)),
        _samples(runs),
        sections(runs),
    ]
    for i, table in timetables.items():
        parts.append(_timetable(runs, i, table))
    parts.append(_settings(runs, settings(given)))
    return "".join(parts)


def _dot(run: int) -> str:
    return f'<i class="dot" style="--c:var(--c{run % COLOURS})"></i>'


def _cards(runs: Runs) -> str:
    """Return the HTML of one card for each run, with its progress and last loss, and the reasons of failed runs."""
    found = []
    for i, run in enumerate(runs):
        words, share = facts.progress(run)
        dot = _dot(i) if len(runs) > 1 else ""
        loss = "–"
        for row in run.part("train")[-1:]:
            loss = f"training loss {row['lm_loss']:.3f}"
        found.append(
            f'<button class="card" data-run="{i}" aria-pressed="true" title="{escape(run.folder)}">'
            f'<b>{dot}{escape(run.name)}</b><span class="loss">{loss}</span>'
            f'<small>{escape(words)}</small><span class="bar"><span style="width:{share:.1%}"></span></span></button>'
        )
    reasons = ""
    for run in runs:
        if run.reason:
            reasons += f'<p class="why"><b>{escape(run.name)}</b> failed: {escape(run.reason)}</p>'
    return f'<section class="cards">{"".join(found)}</section>{reasons}'


def _controls() -> str:
    """Return the HTML of the controls that all charts share."""
    axes = ""
    for value, words in {"iteration": "iterations", "tokens": "tokens", "hours": "hours"}.items():
        checked = " checked" if value == "iteration" else ""
        axes += f'<label><input type="radio" name="x" value="{value}"{checked}>{words}</label>'
    return (
        f'<section class="controls"><span class="pick">{axes}</span>'
        '<label class="smooth">smooth <input type="range" id="smooth" min="0" max="0.98" step="0.01" value="0"></label>'
        '<button id="whole" hidden>reset zoom</button></section>'
    )


def _figures(runs: Runs, found: Sequence[Chart]) -> str:
    """Return the HTML of the charts, which page.js draws from the data in it."""
    if not found:
        return '<p class="note">metrics.jsonl has no values to draw yet.</p>'
    names = []
    axes = []
    for run in runs:
        names.append(run.name)
        axes.append(run.axes())
    figures = ""
    for chart in found:
        data = f'<script type="application/json">{as_data(chart._asdict())}</script>'
        figures += f'<figure class="chart" id="chart-{chart.name}">{data}</figure>'
    about = as_data({"names": names, "axes": axes})
    return f'<script type="application/json" id="about">{about}</script><section class="grid">{figures}</section>'


def _table(title: str, names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], code: bool = False) -> str:
    """Return an HTML table with a row for each name and a column for each run.

    A table of a single run has no header. code: whether the names on the left are shown as code.
    """
    if not rows:
        return ""
    top = ""
    if len(names) > 1:
        for i, name in enumerate(names):
            top += f"<th>{_dot(i)}{escape(name)}</th>"
        top = f"<thead><tr><td></td>{top}</tr></thead>"
    lines = ""
    for name, values in rows:
        shown = f"<code>{escape(name)}</code>" if code else escape(name)
        cells = "".join(f"<td>{escape(value)}</td>" for value in values)
        lines += f"<tr><th>{shown}</th>{cells}</tr>"
    words = f"<h2>{escape(title)}</h2>" if title else ""
    return f'<section>{words}<div class="wide"><table>{top}<tbody>{lines}</tbody></table></div></section>'


def _samples(runs: Runs) -> str:
    """Return the HTML of the texts of each prompt, with a row for each iteration and a column for each run."""
    found: dict[str, dict[int, list[str]]] = {}
    for i, run in enumerate(runs):
        for row in run.part("samples"):
            for sample in row["samples"]:
                texts = found.setdefault(sample["prompt"], {}).setdefault(row["iteration"], [""] * len(runs))
                texts[i] = sample["text"]
    names = [run.name for run in runs]
    html = ""
    for prompt, by_iteration in found.items():
        rows = [(f"{iteration:,}", texts) for iteration, texts in sorted(by_iteration.items())]
        html += _table(f"Samples of “{prompt}”", names, rows)
    return f'<div class="samples">{html}</div>' if html else ""


def _timetable(runs: Runs, run: int, table: Timetable) -> str:
    """Return the HTML of a run's pipeline timetable."""
    title = titled("Pipeline timetable", _dot(run) + escape(runs[run].name), runs)
    return (
        f'<section><h2>{title}</h2><div class="wide">{as_svg(table)}</div><p class="note">'
        f"Forward blue, backward orange, weight gradients green; numbers are micro-batches. The whole step took "
        f"{table.chosen.seconds * 1e3:.1f} ms; the median of {table.kept} steps is {table.usual * 1e3:.1f} ms."
        "</p></section>"
    )


def _settings(runs: Runs, rows: Sequence[Setting]) -> str:
    """Return the HTML of the tables of settings: those that differ, those that were changed, and all."""
    names = [run.name for run in runs]
    differ = []
    changed = []
    by_section: dict[str, list[tuple[str, list[str]]]] = {}
    for row in rows:
        by_section.setdefault(row.section, []).append((row.flag, row.values))
        if row.differs:
            differ.append((row.flag, row.values))
        elif row.changed:
            changed.append((row.flag, row.values[:1]))
    shared = "Settings that are not defaults"
    parts = []
    if len(runs) > 1:
        shared += ", equal in all runs"
        words = "Settings that differ" if differ else "No setting differs except the folders"
        parts.append(_table(words, names, differ, code=True) or f"<section><h2>{words}</h2></section>")
    parts.append(_table(shared, names[:1], changed, code=True))
    for section, own in by_section.items():
        inside = _table("", names, own, code=True)
        parts.append(f'<details id="all-{section}"><summary>all settings of {section}</summary>{inside}</details>')
    return "".join(parts)
