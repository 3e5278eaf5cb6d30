"""A self-contained HTML page about runs: Python writes text and tables, page.js draws charts from embedded data."""

import html
import json
import time
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from . import facts
from .curves import Chart, all_charts
from .differences import Setting, compare_settings
from .layers import heat_map_sections, title_with_run
from .runs import RunData
from .timetable import Timetable, as_svg

Runs = Sequence[RunData]
RUN_COLOURS = 8  # number of run colours in page.css
CONTROLS = (
    '<section class="controls"><span class="pick">'
    '<label><input type="radio" name="x" value="iteration" checked>iterations</label>'
    '<label><input type="radio" name="x" value="tokens">tokens</label>'
    '<label><input type="radio" name="x" value="hours">hours</label></span>'
    '<label class="smooth">smooth <input type="range" id="smooth" min="0" max="0.98" step="0.01" value="0"></label>'
    '<button id="whole" hidden>reset zoom</button></section>'
)  # HTML of the controls that all charts share


def escape(text: object) -> str:
    """Return text escaped for HTML."""
    return html.escape(str(text))


def as_data(content: Any) -> str:
    """Return `content` as JSON that is safe inside a script element."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def page(runs: Runs, parameters: Sequence[int | None], timetables: Mapping[int, Timetable]) -> str:
    """Return the HTML of the whole page.

    parameters: number of parameters of each run's model, None if unknown. timetables: index in `runs` -> timetable.
    """
    here = resources.files("megatron_tools.report")
    style = here.joinpath("page.css").read_text(encoding="utf-8")
    script = here.joinpath("page.js").read_text(encoding="utf-8")
    names = " · ".join(run.name for run in runs)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(names)}</title><style>{style}</style></head><body>"
        f'<main id="page">{_body(runs, parameters, timetables)}</main>'
        '<noscript><p class="note">The curves need JavaScript; the tables are complete without it.</p></noscript>'
        f'<div id="tip" hidden></div><script>{script}</script></body></html>\n'
    )


def _body(runs: Runs, parameters: Sequence[int | None], timetables: Mapping[int, Timetable]) -> str:
    """Return the page's content, without its head and scripts."""
    saved_configs = [run.saved_config for run in runs]
    columns = []  # of the table of results, one for each run
    for run, parameter_count in zip(runs, parameters, strict=True):
        columns.append([*facts.result_facts(run), *facts.machine_facts(run, parameter_count)])
    now = time.strftime("%Y-%m-%d %H:%M")
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    note = facts.tokenizer_note(runs)
    parts = [
        f'<header><h1>{escape(title)}</h1><span class="when">{now}</span>'
        '<button id="theme" title="light or dark" aria-label="light or dark">◐</button></header>',
        _cards(runs),
        CONTROLS,
        _figures(runs, all_charts(runs)),
        _table("Results", runs, facts.facts_table(columns)),
        f'<p class="note">{escape(note)}</p>' if note else "",
        _samples(runs),
        heat_map_sections(runs),
    ]
    for i, table in timetables.items():
        parts.append(_timetable(runs, i, table))
    parts.append(_settings(runs, compare_settings(saved_configs)))
    return "".join(parts)


def _dot(run: int) -> str:
    return f'<i class="dot" style="--c:var(--c{run % RUN_COLOURS})"></i>'


def _cards(runs: Runs) -> str:
    """Return the HTML of one card for each run, with its progress and last loss, and the reasons of failed runs."""
    cards = []
    for index, run in enumerate(runs):
        state, share = facts.progress(run)
        dot = _dot(index) if len(runs) > 1 else ""
        loss = "–"
        # The last row, if there is any.
        for row in run.trained[-1:]:
            loss = f"training loss {row['lm_loss']:.3f}"
        cards.append(
            f'<button class="card" data-run="{index}" aria-pressed="true" title="{escape(run.folder)}">'
            f'<b>{dot}{escape(run.name)}</b><span class="loss">{loss}</span>'
            f'<small>{escape(state)}</small><span class="bar"><span style="width:{share:.1%}"></span></span></button>'
        )
    reasons = ""
    for run in runs:
        if run.reason:
            reasons += f'<p class="why"><b>{escape(run.name)}</b> failed: {escape(run.reason)}</p>'
    return f'<section class="cards">{"".join(cards)}</section>{reasons}'


def _figures(runs: Runs, charts: Sequence[Chart]) -> str:
    """Return the HTML of the charts, which page.js draws from the data in it."""
    if not charts:
        return '<p class="note">metrics.jsonl has no values to draw yet.</p>'
    names = [run.name for run in runs]
    # The places of a run's iterations on each horizontal axis that the page offers.
    axes = [run.axes() for run in runs]
    figures = ""
    for chart in charts:
        data = f'<script type="application/json">{as_data(chart._asdict())}</script>'
        figures += f'<figure class="chart" id="chart-{chart.name}">{data}</figure>'
    page_data = as_data({"names": names, "axes": axes})
    return f'<script type="application/json" id="about">{page_data}</script><section class="grid">{figures}</section>'


def _table(title: str, runs: Runs, rows: Sequence[tuple[str, Sequence[str]]], code: bool = False) -> str:
    """Return an HTML table with a row for each name and a column for each run.

    A table of a single run has no header. code: whether the names on the left are shown as code.
    """
    if not rows:
        return ""
    header = ""
    if len(runs) > 1:
        for i, run in enumerate(runs):
            header += f"<th>{_dot(i)}{escape(run.name)}</th>"
        header = f"<thead><tr><td></td>{header}</tr></thead>"
    body = ""
    for name, values in rows:
        shown = f"<code>{escape(name)}</code>" if code else escape(name)
        cells = "".join(f"<td>{escape(value)}</td>" for value in values)
        body += f"<tr><th>{shown}</th>{cells}</tr>"
    heading = f"<h2>{escape(title)}</h2>" if title else ""
    return f'<section>{heading}<div class="wide"><table>{header}<tbody>{body}</tbody></table></div></section>'


def _samples(runs: Runs) -> str:
    """Return the HTML of the texts of each prompt, with a row for each iteration and a column for each run."""
    texts_by_prompt: dict[str, dict[int, list[str]]] = {}
    for i, run in enumerate(runs):
        for row in run.rows_of("samples"):
            for sample in row["samples"]:
                by_iteration = texts_by_prompt.setdefault(sample["prompt"], {})
                # A row of texts, one for each run, begins empty.
                texts = by_iteration.setdefault(row["iteration"], [""] * len(runs))
                texts[i] = sample["text"]
    tables = ""
    for prompt, by_iteration in texts_by_prompt.items():
        rows = []
        for iteration, texts in sorted(by_iteration.items()):
            rows.append((f"{iteration:,}", texts))
        tables += _table(f"Samples of “{prompt}”", runs, rows)
    return f'<div class="samples">{tables}</div>' if tables else ""


def _timetable(runs: Runs, run: int, table: Timetable) -> str:
    """Return the HTML of a run's pipeline timetable."""
    title = title_with_run("Pipeline timetable", _dot(run) + escape(runs[run].name), runs)
    return (
        f'<section><h2>{title}</h2><div class="wide">{as_svg(table)}</div><p class="note">'
        f"Forward blue, backward orange, weight gradients green; numbers are micro-batches. The whole step took "
        f"{table.chosen.seconds * 1e3:.1f} ms; the median of {table.num_iterations} steps is "
        f"{table.median_seconds * 1e3:.1f} ms.</p></section>"
    )


def _settings(runs: Runs, rows: Sequence[Setting]) -> str:
    """Return the HTML of the tables of settings: those that differ, those that were changed, and all."""
    differing = []
    changed = []
    by_section: dict[str, list[tuple[str, list[str]]]] = {}
    for row in rows:
        by_section.setdefault(row.section, []).append((row.flag, row.values))
        if row.differs:
            differing.append((row.flag, row.values))
        elif row.changed:
            # The value is equal in all runs, so one column shows it.
            changed.append((row.flag, row.values[:1]))
    changed_title = "Settings that are not defaults"
    parts = []
    if len(runs) > 1:
        changed_title += ", equal in all runs"
        if differing:
            parts.append(_table("Settings that differ", runs, differing, code=True))
        else:
            parts.append("<section><h2>No setting differs except the folders</h2></section>")
    parts.append(_table(changed_title, runs[:1], changed, code=True))
    for section, section_rows in by_section.items():
        table = _table("", runs, section_rows, code=True)
        parts.append(f'<details id="all-{section}"><summary>all settings of {section}</summary>{table}</details>')
    return "".join(parts)
