"""Charts and heat maps of --log-layers: a line or a row for each layer, over the iterations of log lines."""

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

from .runs import RunRead

Lines = dict[str, list[float | None]]  # layer -> its values, None where it has none
# Metric of a layer in metrics.jsonl -> title.
TITLES = {
    "weight_norm": "Weight norm by layer",
    "grad_norm": "Gradient norm by layer",
    "update_ratio": "Update-to-weight ratio by layer",
    "activation_rms": "RMS of activations by layer",
    "attention_logit": "Largest attention logit by layer",
    "imbalance": "Imbalance of experts by layer (largest share times number of experts)",
    "dead_experts": "Experts without tokens by layer",
}
SHARES = "Share of tokens by expert in the last step"
EVEN = {"imbalance": 1.0}  # metric -> its value if a layer's experts have equal numbers of tokens
# Metrics that may be negative or zero, so their axes and colours are not logarithmic.
LINEAR = {"attention_logit", "imbalance", "dead_experts", "share"}
WIDTH, LEFT, HEIGHT = 860, 190, 16  # pixels: total width, width of a layer's name, height of a row
COLUMNS = 120  # maximum number of columns of a heat map
SCALE = (68, 1, 84), (33, 145, 140), (253, 231, 37)  # colours of the lowest, the middle and the highest value


class LayerValues(NamedTuple):
    """Values of one metric: for each layer, a list with one value for each of `iterations`, None if unknown.

    axis: what the numbers `iterations` count; the name of the columns of a heat map.
    """

    metric: str
    iterations: list[int]
    layers: Lines
    axis: str = "iteration"


def titled(title: str, name: str, runs: Sequence[RunRead]) -> str:
    """Return a title, with the name of its run if there are several runs."""
    return f"{title}: {name}" if len(runs) > 1 else title


def values_of(run: RunRead) -> list[LayerValues]:
    """Return the values of each metric that the run logged by layer."""
    rows = []
    iterations = []
    names: dict[str, None] = {}
    for row in run.part("train"):
        layers = row.get("layers")
        if layers:
            rows.append(layers)
            iterations.append(row["iteration"])
            names |= dict.fromkeys(layers)
    found = []
    for metric in TITLES:
        lines = {}
        for name in names:
            values = [layers.get(name, {}).get(metric) for layers in rows]
            if set(values) - {None}:
                lines[name] = values
        if lines:
            found.append(LayerValues(metric, iterations, lines))
    return found


def shares_of(run: RunRead) -> LayerValues | None:
    """Return each expert's share of a layer's tokens in the last logged step.

    The first line holds the even share, for comparison; a line for each layer follows. Here, the field `iterations`
    holds the indices of the experts. Returns None if the run has no experts.
    """
    layers: dict[str, list[int]] = {}
    for row in run.part("train"):
        layers = row.get("expert_tokens") or layers
    shares: Lines = {}
    for name, tokens in layers.items():
        total = sum(tokens)
        if total:
            shares[name] = [n / total for n in tokens]
    if not shares:
        return None
    count = max(map(len, shares.values()))
    lines: Lines = {f"even share, 1/{count}": [1 / count] * count}
    lines |= shares
    return LayerValues("share", list(range(count)), lines, "expert")


def heat_map(values: LayerValues) -> str:
    """Return an SVG with a row for each layer and a column for each iteration, or for some of them if there are many.

    The scale of its colours follows the SVG.
    Colours are logarithmic, except for the metrics in `LINEAR`. Experts are columns, too, and all of them are shown.
    """
    step = 1
    if values.axis == "iteration":
        step = math.ceil(len(values.iterations) / COLUMNS)
    columns = range(0, len(values.iterations), step)
    shown = {}
    known = []
    for name, of in values.layers.items():
        heights = [_height(values.metric, of[at]) for at in columns]
        shown[name] = heights
        known += [height for height in heights if height is not None]
    low = min(known, default=0.0)
    span = max(max(known, default=0.0) - low, 1e-12)
    wide = (WIDTH - LEFT) / len(columns)
    tall = HEIGHT * len(shown) + 22
    name = TITLES.get(values.metric, SHARES)
    parts = [f'<svg viewBox="0 0 {WIDTH} {tall}" width="{WIDTH}" role="img" font-size="11" aria-label="{name}">']
    for row, (name, heights) in enumerate(shown.items()):
        y = row * HEIGHT
        parts.append(f'<text x="0" y="{y + 12}" fill="currentColor">{html.escape(name)}</text>')
        for column, (at, height) in enumerate(zip(columns, heights, strict=True)):
            if height is None:
                continue
            words = f"{name}, {values.axis} {values.iterations[at]:,}: {values.layers[name][at]:.4g}"
            parts.append(
                f'<rect x="{LEFT + column * wide:.1f}" y="{y}" width="{wide + 0.3:.1f}" height="{HEIGHT - 1}" '
                f'fill="{_colour((height - low) / span)}"><title>{html.escape(words)}</title></rect>'
            )
    first = values.iterations[0]
    last = values.iterations[columns[-1]]
    axis = HEIGHT * len(shown) + 14
    parts.append(f'<text x="{LEFT}" y="{axis}" fill="currentColor">{values.axis} {first:,}</text>')
    parts.append(f'<text x="{WIDTH}" y="{axis}" fill="currentColor" text-anchor="end">{last:,}</text></svg>')
    return "".join(parts) + _scale(values.metric, low, low + span)


def sections(runs: Sequence[RunRead]) -> str:
    """Return the HTML of the heat maps of all runs, one section for each run that logged layers."""
    parts = []
    for run in runs:
        maps = ""
        for values in values_of(run):
            maps += f'<h3>{TITLES[values.metric]}</h3><div class="wide">{heat_map(values)}</div>'
        shares = shares_of(run)
        if shares:
            maps += f'<h3>{SHARES}</h3><div class="wide">{heat_map(shares)}</div>'
        if maps:
            title = titled("Layers", html.escape(run.name), runs)
            parts.append(f"<section><h2>{title}</h2>{maps}</section>")
    return "".join(parts)


def _height(metric: str, value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    if metric in LINEAR:
        return value
    return math.log10(value) if value > 0 else None


def _scale(metric: str, low: float, high: float) -> str:
    """Return the HTML of the scale of a heat map. low, high: the lowest and the highest value, of `_height`."""
    words = " (linear)"
    if metric not in LINEAR:
        low = 10**low
        high = 10**high
        words = " (logarithmic)"
    return f'<p class="note">{low:.3g}<i class="scale"></i>{high:.3g}{words}</p>'


def _colour(share: float) -> str:
    at = min(int(share * 2), 1)
    mixed = (a + (b - a) * (share * 2 - at) for a, b in zip(SCALE[at], SCALE[at + 1], strict=True))
    return "#" + "".join(f"{round(each):02x}" for each in mixed)
