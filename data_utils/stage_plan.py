"""How many samples, tokens and epochs each corpus gives in each data stage of a run, as a table and a plot."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.atomic import whole_file
from megatron.config import Config
from megatron.data.corpora import corpus_names, tokens_of


class Use(NamedTuple):
    """What a stage reads of a corpus. epochs: of the corpus, at the end of the stage, counted from the first stage."""

    stage: str
    corpus: str
    samples: int
    tokens: int
    epochs: float


def uses(dataset: Any, config: Config, samples: int) -> list[Use]:
    """Return what each stage of a training data set reads of each corpus, and the sums of the whole run.

    samples: number of samples of the run.
    """
    members = list(getattr(dataset, "datasets", [dataset]))
    names = corpus_names(config.data.paths)[: len(members)]
    begins = [begin for begin in getattr(dataset, "begins", [0]) if begin < samples]
    counts = [_consumed(dataset, n) for n in (*begins, samples)]
    found = []
    for begin, end, before, after in zip(begins, [*begins[1:], samples], counts, counts[1:], strict=False):
        found += _rows(f"{begin:,} to {end - 1:,}", names, members, before, after)
    return found + (_rows("all", names, members, counts[0], counts[-1]) if len(begins) > 1 else [])


def _consumed(dataset: Any, samples: int) -> list[int]:
    return dataset.consumed(samples) if hasattr(dataset, "consumed") else [samples]


def _rows(stage: str, names: Sequence[str], members: Sequence[Any], before: list[int], after: list[int]) -> list[Use]:
    return [
        Use(stage, name, b - a, (b - a) * tokens_of(member), b / member.samples_per_epoch)
        for name, member, a, b in zip(names, members, before, after, strict=True)
        if b > a
    ]


def table(found: Sequence[Use]) -> str:
    """Return the rows as aligned text."""
    head = ("samples of the stage", "corpus", "samples", "tokens", "epochs at its end")
    rows = [head, *((u.stage, u.corpus, f"{u.samples:,}", f"{u.tokens:,}", f"{u.epochs:.3f}") for u in found)]
    form = "  ".join(f"{{:{'<' if i < 2 else '>'}{max(len(row[i]) for row in rows)}}}" for i in range(len(head)))
    return "\n".join(form.format(*row) for row in rows)


def draw(dataset: Any, config: Config, samples: int, path: Path) -> None:
    """Draw the share of each corpus over the run, and the epochs of each corpus, as a PNG.

    Raises ValueError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--png needs the package matplotlib: pip install matplotlib") from None
    members = list(getattr(dataset, "datasets", [dataset]))
    names = corpus_names(config.data.paths)[: len(members)]
    begins = [begin for begin in getattr(dataset, "begins", [0]) if begin < samples]
    points = sorted({*begins, samples, *(samples * i // 60 for i in range(61))})
    counts = [_consumed(dataset, n) for n in points]
    edges = [*begins, samples]
    of_stages = [_consumed(dataset, n) for n in edges]
    figure = Figure(figsize=(7.6, 5.4), dpi=150, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    floor = [0.0] * (len(edges) - 1)
    for i, (name, member) in enumerate(zip(names, members, strict=True)):
        shares = [
            (after[i] - before[i]) / (end - begin)
            for before, after, begin, end in zip(of_stages, of_stages[1:], edges, edges[1:], strict=False)
        ]
        top = [low + share for low, share in zip(floor, shares, strict=True)]
        above.stairs(top, edges, baseline=floor, fill=True, alpha=0.75, label=name)
        below.plot(points, [count[i] / member.samples_per_epoch for count in counts], label=name, linewidth=1.8)
        floor = top
    above.set_ylabel("share of the samples")
    above.set_ylim(0, 1)
    below.set_ylabel("epochs read")
    below.set_xlabel("consumed samples")
    below.set_ylim(bottom=0)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    above.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    with whole_file(path) as there:
        figure.savefig(there, format="png")
