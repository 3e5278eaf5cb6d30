"""Figures of timetables: a row of bars for each stage, with all timetables on the same time scale.

SVG figures need no package, PNG figures need matplotlib.
"""

import math
from collections.abc import Mapping, Sequence

from data_utils.cli import new_figure, save_figure
from megatron.atomic import write_text
from tds.timetable import Span

# Kind of pass -> (its colour in chunks 0, 2, ... of a stage, its colour in chunks 1, 3, ...).
COLOURS = {"F": ("#7aa6d9", "#b4cdea"), "B": ("#e0a458", "#eec999"), "W": ("#7fb685", "#b5d6b9")}
KIND_NAMES = {"F": "forward", "B": "backward", "W": "weight gradients"}
# Sizes in pixels.
WIDTH = 860
HEIGHT = 34  # of a stage
LEFT = 70  # width of a stage's name
HEAD = 26  # height of the title
AXIS = 26  # height of the time axis

Rows = Mapping[str, Sequence[Span]]


def pass_kinds(rows: Rows) -> list[str]:
    """Return the kinds of passes present: F (forward), B (backward), and W for separate weight gradients."""
    present = {span.kind for spans in rows.values() for span in spans}
    return [kind for kind in KIND_NAMES if kind in present]


def last_end(rows: Rows) -> float:
    """Return the time at which the last pass of all timetables ends."""
    return max(span.end for spans in rows.values() for span in spans)


def axis_ticks(end: float) -> list[float]:
    """Return at most nine round numbers from 0 to `end`, for the time axis."""
    # For an end of 70, the step is at least 8.75: of 1, 2, 5 and 10, the first that suffices is 10.
    min_step = end / 8
    power = 10 ** math.floor(math.log10(min_step))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= min_step)
    return [step * i for i in range(int(end / step + 1e-9) + 1)]  # 1e-9: a rounding error must not drop the last


def as_svg(rows: Rows, stages: int, unit: str = "") -> str:
    """Return an SVG of timetables.

    rows: title of a timetable -> its passes. unit: `ms` or `""`. With `ms`, the times of the passes are seconds, and
    the figure shows milliseconds. With `""`, the times have no unit.
    """
    scale = (WIDTH - LEFT - 10) / last_end(rows)
    row_height = stages * HEIGHT + HEAD
    height = row_height * len(rows) + AXIS + 20
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for row, (title, spans) in enumerate(rows.items()):
        top = row * row_height + HEAD
        elements.append(f'<text x="4" y="{top - 8}" font-weight="bold">{title}</text>')
        for stage in range(stages):
            elements.append(f'<text x="4" y="{top + stage * HEIGHT + 22}">stage {stage}</text>')
        for span in spans:
            elements.append(_bar(span, scale, top + span.stage * HEIGHT + 4))
    y = row_height * len(rows) + 6
    factor = 1e3 if unit == "ms" else 1.0
    for tick in axis_ticks(last_end(rows) * factor):
        # scale is pixels per unit of the passes' times, and ticks may be milliseconds.
        x = LEFT + tick / factor * scale
        elements.append(
            f'<path d="M{x:.1f} {y}v4" stroke="#777"/><text x="{x:.1f}" y="{y + 16}" text-anchor="middle" '
            f'fill="#555" font-size="10">{tick:g}</text>'
        )
    label = f"time, {unit}" if unit else "time"
    elements.append(f'<text x="4" y="{y + 16}" fill="#555" font-size="10">{label}</text>')
    for index, kind in enumerate(pass_kinds(rows)):
        x = LEFT + index * 90
        elements.append(
            f'<rect x="{x}" y="{y + 24}" width="12" height="12" rx="2" fill="{COLOURS[kind][0]}"/>'
            f'<text x="{x + 17}" y="{y + 34}" font-size="11">{KIND_NAMES[kind]}</text>'
        )
    return "\n".join([*elements, "</svg>"]) + "\n"


def _bar(span: Span, scale: float, y: int) -> str:
    x = LEFT + span.begin * scale
    w = (span.end - span.begin) * scale
    number = f'<text x="{x + w / 2:.1f}" y="{y + 17}" text-anchor="middle">{span.micro}</text>' if w > 9 else ""
    colour = COLOURS[span.kind][span.chunk % 2]
    return f'<rect x="{x:.1f}" y="{y}" width="{max(w - 1, 0.5):.1f}" height="26" rx="3" fill="{colour}"/>{number}'


def write_png(path: str, rows: Rows, stages: int, unit: str) -> None:
    """Write the figure as PNG. Raises ValueError without matplotlib."""
    factor = 1e3 if unit == "ms" else 1.0
    # 10 pixels separate timetables, and 60 are for axis and legend. 80 pixels make one inch.
    height = len(rows) * (stages * HEIGHT + HEAD + 10) + 60
    figure = new_figure("--png", figsize=(WIDTH / 80, height / 80), layout="constrained")
    all_axes = figure.subplots(len(rows), sharex=True, squeeze=False)
    stage_names = [f"stage {stage}" for stage in range(stages)]
    min_numbered = 0.012 * last_end(rows) * factor  # a bar below 1.2% of the width has no room for its number
    for axes, (title, spans) in zip(all_axes[:, 0], rows.items(), strict=True):
        axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
        for span in spans:
            begin = span.begin * factor
            duration = (span.end - span.begin) * factor
            # A bar lies in the row of its stage, is 0.76 rows high, and extends from `begin` to the right.
            axes.barh(
                span.stage,
                duration,
                0.76,
                begin,
                color=COLOURS[span.kind][span.chunk % 2],
                edgecolor="white",
                linewidth=0.6,
            )
            if duration > min_numbered:
                axes.text(begin + duration / 2, span.stage, str(span.micro), ha="center", va="center", fontsize=9)
        axes.set_yticks(range(stages), stage_names)
        axes.invert_yaxis()
        axes.tick_params(left=False)
        axes.spines[["top", "right", "left"]].set_visible(False)
    all_axes[-1, 0].set_xlabel(f"time, {unit}" if unit else "time")
    from matplotlib.patches import Patch

    legend = [Patch(color=COLOURS[kind][0], label=KIND_NAMES[kind]) for kind in pass_kinds(rows)]
    figure.legend(handles=legend, loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    save_figure(figure, path, dpi=160)


def write_figures(svg: str | None, png: str | None, rows: Rows, stages: int, unit: str = "") -> None:
    """Write the figure to the SVG file `svg` and to the PNG file `png`, unless they are None."""
    if svg:
        write_text(svg, as_svg(rows, stages, unit))
    if png:
        write_png(png, rows, stages, unit)
