"""Predictions of published training speeds, with one set of constants for all."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron.config import Config
from megatron.config.command_line import with_values
from megatron.config.ds_config import resolve
from megatron.training.memory.sizes import parameters, stages_of

from .cluster import load_cluster
from .cost import DEFAULT, cost_of

# Frameworks of that time kept attention scores in memory. Scaling, mask, softmax and dropout each read and
# write them.
THEN = replace(DEFAULT, score_passes=5.0)
NARAYANAN = "Narayanan et al. 2021, Table 1"
SMITH = "Smith et al. 2022, section 2.4 (MT-NLG)"
ASCEND = "Ascend ModelZoo, GPT-2 for PyTorch"


@dataclass(frozen=True)
class Row:
    """Published run. tflops: per device. micro: micro-batch size, an assumption if `assumed` names it."""

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


def _megatron(name: str, heads: int, hidden: int, layers: int, tensor: int, stages: int, devices: int, batch: int, micro: int, tflops: float) -> Row:  # fmt: skip
    return Row(NARAYANAN, name, "a100", layers, hidden, heads, 2048, 51200, tensor, stages, devices, batch, micro, tflops, assumed="micro-batch")  # fmt: skip


def _mt_nlg(nodes: int, tflops: float) -> Row:
    return Row(SMITH, f"530B, {nodes} nodes", "a100", 105, 20480, 128, 2048, 51200, 8, 35, 8 * nodes, 1920, 1, tflops)


def _ascend(
    name: str, cluster: str, layers: int, hidden: int, heads: int, sequence: int, speed: float, tensor: int
) -> Row:
    return Row(ASCEND, name, cluster, layers, hidden, heads, sequence, 50257, tensor, 1, 8, 32, 4, None, speed, False, "layout and batch")  # fmt: skip


ROWS = (
    _megatron("1.7B", 24, 2304, 24, 1, 1, 32, 512, 4, 137),
    _megatron("3.6B", 32, 3072, 30, 2, 1, 64, 512, 4, 138),
    _megatron("7.5B", 32, 4096, 36, 4, 1, 128, 512, 4, 142),
    _megatron("18.4B", 48, 6144, 40, 8, 1, 256, 1024, 4, 135),
    _megatron("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 4, 138),
    _megatron("76.1B", 80, 10240, 60, 8, 4, 1024, 1792, 2, 140),
    _megatron("145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 2, 148),
    _megatron("310.1B", 128, 16384, 96, 8, 16, 1920, 2160, 1, 155),
    _megatron("529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 1, 163),
    _megatron("1008.0B", 160, 25600, 128, 8, 64, 3072, 3072, 1, 163),
    _mt_nlg(280, 126),
    _mt_nlg(350, 121),
    _mt_nlg(420, 113),
    _ascend("345M, V", "v100", 24, 1024, 16, 1024, 37.8, 8),
    _ascend("345M, NPU", "910a", 24, 1024, 16, 1024, 59.7, 8),
    _ascend("1.3B, V", "v100", 24, 2048, 16, 1024, 15.71, 8),
    _ascend("1.3B, NPU", "910a", 24, 2048, 16, 1024, 21.47, 8),
    _ascend("2.7B, V", "v100", 32, 2560, 32, 2048, 4.125, 8),
    _ascend("2.7B, NPU", "910a", 32, 2560, 32, 2048, 5.280, 8),
    _ascend("3.7B, V", "v100", 32, 3072, 24, 2048, 3.120, 8),
    _ascend("3.7B, NPU", "910a", 32, 3072, 24, 2048, 4.558, 8),
    _ascend("345M without model parallel, A", "a100", 24, 1024, 16, 1024, 235, 1),
    _ascend("345M without model parallel, NPU", "910a", 24, 1024, 16, 1024, 227, 1),
)


@dataclass(frozen=True)
class Compared:
    """Predicted and published TFLOP/s per device of a run.

    published is computed from samples per second if TFLOP/s were not reported.
    """

    row: Row
    parameters: int
    micros: int
    bubble: float
    predicted: float
    published: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.published - 1


def config_of(row: Row) -> Config:
    """Return our settings for a published run: GPT-2, Adam in mixed precision.

    ZeRO 1 represents Megatron's unsharded optimizer, which takes about the same time.
    """
    replicas = row.devices // row.tensor // row.stages
    return with_values(
        Config(),
        {
            "family": "gpt2", "num_layers": row.layers, "hidden_size": row.hidden, "num_attention_heads": row.heads,
            "seq_length": row.sequence, "vocab_size": row.vocabulary, "model_parallel_size": row.tensor,
            "pipe_parallel_size": row.stages if row.stages > 1 else 0, "sequence_parallel": False, "batch_size": row.micro,
            "gas": row.batch // replicas // row.micro, "checkpoint_activations": row.recompute, "zero_stage": 1,
            "precision": "fp16" if row.cluster in ("v100", "910a") else "bf16",
        },
    )  # fmt: skip


def compare(row: Row) -> Compared:
    """Predict a published run with the constants `THEN` and compare the results."""
    config, cluster = config_of(row), load_cluster(row.cluster)
    cost = cost_of(config, resolve(config, row.devices, True), row.devices, cluster, stages_of(config), THEN)
    published = row.tflops
    if published is None:
        assert row.samples_per_second is not None
        published = row.samples_per_second / row.batch * cost.done_flops / row.devices / 1e12
    return Compared(row, parameters(config), config.train.gas, cost.bubble, cost.tflops, published)


def lines() -> Iterator[str]:
    """Yield the table, then the median error by source, of all rows with a published layout, and of all rows."""
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
        cells = (row.source, row.name, f"{each.parameters / 1e9:,.1f} G", f"{row.devices:,} {row.cluster}", grid, f"{each.micros} of {row.micro}", f"{each.bubble:.1%}", f"{each.published:.0f}", f"{each.predicted:.0f}", f"{each.error:+.0%}")  # fmt: skip
        yield f"| {' | '.join(cells)} |"
    yield ""
    for source in dict.fromkeys(each.row.source for each in found):
        yield f"median error, {source}: {median_error([e for e in found if e.row.source == source]):.1%}"
    yield f"median error where the layout is published (all but Ascend's): {median_error([e for e in found if e.row.source != ASCEND]):.1%}"
    yield f"median error of all {len(found)} rows: {median_error(found):.1%}"


def median_error(found: list[Compared]) -> float:
    """Return the median of the absolute errors."""
    return statistics.median(abs(each.error) for each in found)
