"""Charts and heat maps of --log-layers: a line or a row for each layer, over the iterations of log lines."""

import html
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .runs import RunData

Lines = dict[str, list[float | None]]  # layer -> its values, None where it has none
# Metric of a layer in metrics.jsonl -> title.
METRIC_TITLES = {
    "weight_norm": "Weight norm by layer",
    "grad_norm": "Gradient norm by layer",
    "update_ratio": "Update-to-weight ratio by layer",
    "activation_rms": "RMS of activations by layer",
    "attention_logit": "Largest attention logit by layer",
    "imbalance": "Imbalance of experts by layer (largest share times number of experts)",
    "dead_experts": "Experts without tokens by layer",
}
SHARES_TITLE = "Share of tokens by expert in the last step"
EVEN_VALUES = {"imbalance": 1.0}  # metric -> its value if a layer's experts have equal numbers of tokens
# Metrics that may be negative or zero, so their axes and colours are not logarithmic.
LINEAR_METRICS = {"attention_logit", "imbalance", "dead_experts", "share"}
# Sizes in pixels.
WIDTH = 860
LEFT = 190  # width of a layer's name
HEIGHT = 16  # of a row
MAX_COLUMNS = 120  # maximum number of columns of a heat map
COLOUR_STOPS = (68, 1, 84), (33, 145, 140), (253, 231, 37)  # colours of the lowest, the middle and the highest value


class LayerValues(NamedTuple):
    """Values of one metric: for each layer, a list with one value for each of `iterations`, None if unknown.

    axis: what the numbers `iterations` count; the name of the columns of a heat map.
    """

    metric: str
    iterations: list[int]
    layers: Lines
    axis: str = "iteration"


def title_with_run(title: str, name: str, runs: Sequence[RunData]) -> str:
    """Return a title, with the name of its run if there are several runs."""
    return f"{title}: {name}" if len(runs) > 1 else title


def layer_values(run: RunData) -> Iterator[LayerValues]:
    """Yield the values of each metric that the run logged by layer."""
    layer_rows = []
    iterations = []
    names: dict[str, None] = {}  # a set that keeps its order
    for row in run.rows_of("train"):
        layers = row.get("layers")
        if layers:
            layer_rows.append(layers)
            iterations.append(row["iteration"])
            names |= dict.fromkeys(layers)
    for metric in METRIC_TITLES:
        values_by_layer = {}
        for name in names:
            values = [layers.get(name, {}).get(metric) for layers in layer_rows]
            # The layer has at least one value of this metric.
            if set(values) - {None}:
                values_by_layer[name] = values
        if values_by_layer:
            yield LayerValues(metric, iterations, values_by_layer)


def expert_shares(run: RunData) -> LayerValues | None:
    """Return each expert's share of a layer's tokens in the last logged step.

    The first line holds the even share, for comparison; a line for each layer follows. Here, the field `iterations`
    holds the indices of the experts. Returns None if the run has no experts.
    """
    token_counts: dict[str, list[int]] = {}
    for row in run.rows_of("train"):
        # The last row that has counts remains.
        token_counts = row.get("expert_tokens") or token_counts
    shares: Lines = {}
    for name, tokens in token_counts.items():
        total = sum(tokens)
        if total:
            shares[name] = [count / total for count in tokens]
    if not shares:
        return None
    num_experts = max(map(len, shares.values()))
    share_lines: Lines = {f"even share, 1/{num_experts}": [1 / num_experts] * num_experts, **shares}
    return LayerValues("share", list(range(num_experts)), share_lines, "expert")


def heat_map(values: LayerValues) -> str:
    """Return an SVG with a row for each layer and a column for each iteration, or for some of them if there are many.

    The scale of its colours follows the SVG. Colours are logarithmic, except for the metrics in `LINEAR_METRICS`.
    Experts are columns, too, and all of them are shown.
    """
    # With more than MAX_COLUMNS iterations, only every `step`-th is a column.
    step = 1
    if values.axis == "iteration":
        step = math.ceil(len(values.iterations) / MAX_COLUMNS)
    columns = range(0, len(values.iterations), step)
    scaled_by_layer = {}
    finite = []
    for name, values_of_layer in values.layers.items():
        scaled = [_scaled_value(values.metric, values_of_layer[index]) for index in columns]
        scaled_by_layer[name] = scaled
        finite += [value for value in scaled if value is not None]
    lowest = min(finite, default=0.0)
    # Not 0 for equal values, because colours divide by the range.
    value_range = max(max(finite, default=0.0) - lowest, 1e-12)
    column_width = (WIDTH - LEFT) / len(columns)
    total_height = HEIGHT * len(scaled_by_layer) + 22  # 22 pixels below the rows for the axis
    title = METRIC_TITLES.get(values.metric, SHARES_TITLE)
    elements = [
        f'<svg viewBox="0 0 {WIDTH} {total_height}" width="{WIDTH}" role="img" font-size="11" aria-label="{title}">'
    ]
    for row, (name, scaled) in enumerate(scaled_by_layer.items()):
        y = row * HEIGHT
        elements.append(f'<text x="0" y="{y + 12}" fill="currentColor">{html.escape(name)}</text>')
        for column, (index, value) in enumerate(zip(columns, scaled, strict=True)):
            if value is None:
                continue
            tooltip = f"{name}, {values.axis} {values.iterations[index]:,}: {values.layers[name][index]:.4g}"
            elements.append(
                f'<rect x="{LEFT + column * column_width:.1f}" y="{y}" width="{column_width + 0.3:.1f}" '
                f'height="{HEIGHT - 1}" '
                f'fill="{_colour_of((value - lowest) / value_range)}"><title>{html.escape(tooltip)}</title></rect>'
            )
    first = values.iterations[0]
    last = values.iterations[columns[-1]]
    axis_y = total_height - 8
    elements.append(f'<text x="{LEFT}" y="{axis_y}" fill="currentColor">{values.axis} {first:,}</text>')
    elements.append(f'<text x="{WIDTH}" y="{axis_y}" fill="currentColor" text-anchor="end">{last:,}</text></svg>')
    return "".join(elements) + _scale_html(values.metric, lowest, lowest + value_range)


def heat_map_sections(runs: Sequence[RunData]) -> str:
    """Return the HTML of the heat maps of all runs, one section for each run that logged layers."""
    parts = []
    for run in runs:
        maps_html = ""
        for values in layer_values(run):
            maps_html += f'<h3>{METRIC_TITLES[values.metric]}</h3><div class="wide">{heat_map(values)}</div>'
        shares = expert_shares(run)
        if shares:
            maps_html += f'<h3>{SHARES_TITLE}</h3><div class="wide">{heat_map(shares)}</div>'
        if maps_html:
            title = title_with_run("Layers", html.escape(run.name), runs)
            parts.append(f"<section><h2>{title}</h2>{maps_html}</section>")
    return "".join(parts)


def _scaled_value(metric: str, value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    if metric in LINEAR_METRICS:
        return value
    return math.log10(value) if value > 0 else None


def _scale_html(metric: str, low: float, high: float) -> str:
    """Return the HTML of the scale of a heat map. low, high: the lowest and the highest value, of `_scaled_value`."""
    kind = " (linear)"
    if metric not in LINEAR_METRICS:
        low = 10**low
        high = 10**high
        kind = " (logarithmic)"
    return f'<p class="note">{low:.3g}<i class="scale"></i>{high:.3g}{kind}</p>'


def _colour_of(share: float) -> str:
    # A share of 0.75 lies halfway between the middle colour and the highest: 0.75 * 2 - 1 = 0.5.
    half = min(int(share * 2), 1)  # 0 below the middle colour, 1 above
    colour = "#"
    for low, high in zip(COLOUR_STOPS[half], COLOUR_STOPS[half + 1], strict=True):
        channel = low + (high - low) * (share * 2 - half)
        colour += f"{round(channel):02x}"
    return colour
