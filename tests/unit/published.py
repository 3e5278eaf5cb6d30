"""Predicted speeds of published training runs (published.json), compared with their published speeds."""

import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.config import Config
from megatron.config.command_line import with_values
from megatron.config.ds_config import resolve
from megatron.estimate.sizes import parameters, stages_of
from megatron_tools.plan.cluster import load_cluster
from megatron_tools.plan.cost import DEFAULT, cost_of

# Constants for the published runs. Their frameworks had no fused attention: scaling, mask, softmax and dropout each
# read and wrote the attention scores in memory.
THEN = replace(DEFAULT, score_passes=5.0)


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
    tflops: float
    recompute: bool = True
    assumed: str = ""


ROWS = tuple(Row(**row) for row in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Compared:
    """Predicted TFLOP/s per device of a published run."""

    row: Row
    parameters: int
    predicted: float

    @property
    def error(self) -> float:
        """Relative error of the predicted speed: positive if the prediction is too fast."""
        return self.predicted / self.row.tflops - 1


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
            "precision": "fp16" if row.cluster == "v100" else "bf16",
        },
    )  # fmt: skip


def compare(row: Row) -> Compared:
    """Predict the speed of a published run with the constants `THEN` and compare it with the published speed."""
    config = config_of(row)
    cluster = load_cluster(row.cluster)
    cost = cost_of(config, resolve(config, row.devices, True), row.devices, cluster, stages_of(config), THEN)
    return Compared(row, parameters(config), cost.tflops)


def median_error(found: list[Compared]) -> float:
    """Return the median of the relative errors, without their signs."""
    return statistics.median(abs(each.error) for each in found)
