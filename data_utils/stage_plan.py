"""Table and plot of the samples, tokens and epochs that each corpus gives in each data stage of a run."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from megatron.config import Config
from megatron.data.blend import tokens_of
from megatron.data.corpus_paths import corpus_names

from .cli import new_figure, save_figure
from .document_uses import corpus_datasets
from .tables import align_columns


class Plan(NamedTuple):
    """The data stages of a run.

    names, members: short name and data set of each corpus. edges: number of the first sample of each stage, and the
    number of samples of the run. consumed: function from a number of samples to how many of them each corpus gives.
    """

    names: Sequence[str]
    members: Sequence[Any]
    edges: Sequence[int]
    consumed: Callable[[int], list[int]]

    def epochs(self, samples: int) -> list[float]:
        """Return how many epochs of each corpus the first `samples` samples are."""
        return [n / each.samples_per_epoch for n, each in zip(self.consumed(samples), self.members, strict=True)]


def build_plan(dataset: Any, config: Config, samples: int) -> Plan:
    """Return the stages of a training data set; a data set without stages counts as one. samples: those of the run."""
    members = corpus_datasets(dataset)
    # Only a data set with stages has `begins`. Stages after the last sample are left out.
    first_samples = [begin for begin in getattr(dataset, "begins", [0]) if begin < samples]
    # A data set of one corpus has no such method: all samples are from this corpus.
    consumed = getattr(dataset, "consumed_per_corpus", lambda samples: [samples])
    return Plan(corpus_names(config.data.paths)[: len(members)], members, [*first_samples, samples], consumed)


def format_table(plan: Plan) -> str:
    """Return a table of what each stage reads of each corpus, and of the whole run if there are several stages.

    Corpora that a stage does not read are left out. The epochs are those that the run has read at the end of the stage.
    """
    # (label, first sample, end) of each stage, and then of all stages together
    stages = [(f"{begin:,} to {end - 1:,}", begin, end) for begin, end in pairwise(plan.edges)]
    if len(stages) > 1:
        stages.append(("all", 0, plan.edges[-1]))
    rows = [("samples of the stage", "corpus", "samples", "tokens", "epochs at its end")]
    for stage, begin, end in stages:
        before = plan.consumed(begin)
        after = plan.consumed(end)
        epochs = plan.epochs(end)
        for i, (name, member) in enumerate(zip(plan.names, plan.members, strict=True)):
            samples = after[i] - before[i]
            if samples > 0:
                tokens = samples * tokens_of(member)
                rows.append((stage, name, f"{samples:,}", f"{tokens:,}", f"{epochs[i]:.3f}"))
    return align_columns(rows, 2)


def draw(plan: Plan, path: str) -> None:
    """Draw the share of each corpus over the run, and the epochs of each corpus, as a PNG.

    Raises ValueError without matplotlib.
    """
    edges = plan.edges
    samples = edges[-1]
    even_points = [samples * i // 60 for i in range(61)]
    points = sorted({*edges, *even_points})
    epochs = list(map(plan.epochs, points))
    counts = list(map(plan.consumed, edges))
    figure = new_figure("--png", figsize=(7.6, 5.4), dpi=150, layout="constrained")
    share_axes, epoch_axes = figure.subplots(2, 1, sharex=True)
    # The shares are stacked: each corpus fills the area between `lower` and `upper`, with one height for each stage.
    lower = [0.0] * (len(edges) - 1)
    for i, name in enumerate(plan.names):
        upper = []
        for stage, base in enumerate(lower):
            read = counts[stage + 1][i] - counts[stage][i]
            upper.append(base + read / (edges[stage + 1] - edges[stage]))
        share_axes.stairs(upper, edges, baseline=lower, fill=True, alpha=0.75, label=name)
        epoch_axes.plot(points, [epochs_read[i] for epochs_read in epochs], label=name, linewidth=1.8)
        lower = upper
    share_axes.set_ylabel("share of the samples")
    share_axes.set_ylim(0, 1)
    epoch_axes.set_ylabel("epochs read")
    epoch_axes.set_xlabel("consumed samples")
    epoch_axes.set_ylim(bottom=0)
    for axes in (share_axes, epoch_axes):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    share_axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    save_figure(figure, path)
