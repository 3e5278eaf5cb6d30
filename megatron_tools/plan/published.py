"""Predicted speeds of published training runs (published.json), compared with their published speeds."""

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.config import Config
from megatron.config.command_line import with_values
from megatron.config.ds_config import resolve
from megatron.training.memory.sizes import parameters, stages_of

from .cluster import load_cluster
from .cost import DEFAULT, cost_of

# Constants for the published runs. Their frameworks had no fused attention: scaling, mask, softmax and dropout each
# read and wrote the attention scores in memory.
THEN = replace(DEFAULT, score_passes=5.0)
ASCEND = "Ascend ModelZoo, GPT-2 for PyTorch"


@dataclass(frozen=True)
class Row:
    """A run whose speed was published.

    tflops: TFLOP/s per device. batch, micro: global batch and micro-batch size in samples. assumed: which of these
    values the publication does not give.
    """

    source: str
    name: str
    cluster: str
    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    tensor: int
    stages: int
    devices: int
    batch: int
    micro: int
    tflops: float | None = None
    samples_per_second: float | None = None
    recompute: bool = True
    assumed: str = ""


ROWS = tuple(Row(**row) for row in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Compared:
    """Predicted and published TFLOP/s per device of a run.

    If the publication gives only samples per second, `published` is computed from them.
    """

    row: Row
    parameters: int
    micros: int
    bubble: float
    predicted: float
    published: float

    @property
    def error(self) -> float:
        """Relative error of the predicted speed: positive if the prediction is too fast."""
        return self.predicted / self.published - 1


def config_of(row: Row) -> Config:
    """Return this project's settings for a published run: GPT-2 with Adam in mixed precision.

    The settings use ZeRO 1. The published runs did not shard the optimizer, but a step takes about the same time.
    """
    replicas = row.devices // row.tensor // row.stages
    return with_values(
        Config(),
        {
            "family": "gpt2", "num_layers": row.layers, "hidden_size": row.hidden, "num_attention_heads": row.heads,
            "seq_length": row.sequence, "vocab_size": row.vocabulary, "model_parallel_size": row.tensor,
            "pipe_parallel_size": row.stages if row.stages > 1 else 0, "sequence_parallel": False,
            "batch_size": row.micro,
            "gas": row.batch // replicas // row.micro, "checkpoint_activations": row.recompute, "zero_stage": 1,
            "precision": "fp16" if row.cluster in ("v100", "910a") else "bf16",
        },
    )  # fmt: skip


def compare(row: Row) -> Compared:
    """Predict the speed of a published run with the constants `THEN` and compare it with the published speed."""
    config = config_of(row)
    cluster = load_cluster(row.cluster)
    cost = cost_of(config, resolve(config, row.devices, True), row.devices, cluster, stages_of(config), THEN)
    published = row.tflops
    if published is None:
        assert row.samples_per_second is not None
        published = row.samples_per_second / row.batch * cost.done_flops / row.devices / 1e12
    return Compared(row, parameters(config), config.train.gas, cost.bubble, cost.tflops, published)


def lines() -> Iterator[str]:
    """Yield the lines of a table of predicted and published speeds, then the median errors of the predictions.

    There is a median for each source, one for all runs whose layout was published, and one for all runs.
    """
    heads = (
        "source",
        "model",
        "parameters",
        "devices",
        "TP x PP x DP",
        "micro-batches",
        "bubble",
        "published TFLOP/s",
        "predicted",
        "error",
    )
    yield f"| {' | '.join(heads)} |"
    yield f"|{' --- |' * len(heads)}"
    found = [compare(row) for row in ROWS]
    for each in found:
        row = each.row
        grid = f"{row.tensor} x {row.stages} x {row.devices // row.tensor // row.stages}"
        cells = (
            row.source,
            row.name,
            f"{each.parameters / 1e9:,.1f} G",
            f"{row.devices:,} {row.cluster}",
            grid,
            f"{each.micros} of {row.micro}",
            f"{each.bubble:.1%}",
            f"{each.published:.0f}",
            f"{each.predicted:.0f}",
            f"{each.error:+.0%}",
        )
        yield f"| {' | '.join(cells)} |"
    yield ""
    for source in dict.fromkeys(each.row.source for each in found):
        yield f"median error, {source}: {median_error([e for e in found if e.row.source == source]):.1%}"
    known = [each for each in found if each.row.source != ASCEND]
    yield f"median error where the layout is published (all except Ascend's): {median_error(known):.1%}"
    yield f"median error of all {len(found)} rows: {median_error(found):.1%}"


def median_error(found: list[Compared]) -> float:
    """Return the median of the relative errors, without their signs."""
    return statistics.median(abs(each.error) for each in found)
