"""Speeds of published training runs, compared with the planner's predictions.

    python -m tests.unit.published

prints the rows of three tables in benchmarks/results.toml. The runs are in three files beside this one:

- published.json: papers from the time before fused attention.
- published_llm_foundry.json: all rows in bf16 of scripts/train/benchmarking/README.md of mosaicml/llm-foundry (July
  2025): model,
  sequence length, devices, device, micro-batch size, micro-batches, recomputation, ZeRO stage, tokens per second
  and device.
- published_presets.json: runs of models that have a preset.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.config import Config
from megatron.config.command_line import with_values
from megatron.config.ds_config import resolve
from megatron.config.families import parse_any_family
from megatron.estimate.sizes import parameters, stages_of
from megatron_tools.plan.cluster import Cluster, load_cluster
from megatron_tools.plan.cost import DEFAULT, cost_of
from tests.support import ROOT

# Constants for runs without fused attention: scaling, mask, softmax and dropout each read and wrote the scores.
UNFUSED = replace(DEFAULT, score_passes=5.0)

# Layers, hidden size and heads of llm-foundry's models (scripts/train/yamls/pretrain), with a vocabulary of 50,368.
FOUNDRY = {
    "125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 12), "1b": (24, 2048, 16), "3b": (32, 2560, 20),
    "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56), "70b": (80, 8192, 64),
}  # fmt: skip
# The reasons of the largest errors, by model and devices of the run.
REASONS = {
    ("MPT 760m, 512 tokens", "8 a100"): "the published speed falls from 2,048 to 512 tokens; on the A100 with 40 GB it "
    "rises",
    ("MPT 1b, 2,048 tokens", "32 a100 40 GB"): "the published speed is 18 % below that on 16 and on 64 devices",
    ("MPT 760m, 32,768 tokens", "8 h100"): "attention on H100 at long sequences",
    ("MPT 30b, 8,192 tokens", "8 a100"): "the published speed falls by 29 % from 4,096 to 8,192 tokens",
    ("qwen3-moe_30b-a3b", "8 h100"): "kernels that fuse the sorting of rows with the experts' matmuls",
    ("MPT 70b, 2,048 tokens", "64 a100 40 GB"): "the published speed is 36 % higher with twice the devices and "
    "micro-batch",
    ("MPT 760m, 1,024 tokens", "8 a100"): "as in the first row",
    ("MPT 1b, 32,768 tokens", "8 h100"): "attention on H100 at long sequences",
    ("MPT 760m, 16,384 tokens", "8 h100"): "attention on H100 at long sequences",
    ("MPT 125m, 2,048 tokens", "128 a100 40 GB"): "the published speed falls by 9 % from 8 to 128 devices, the "
    "predicted speed by 1 %",
}
A100_40_BANDWIDTH = 1555  # gigabytes per second, data sheet of the A100 with 40 GB


@dataclass(frozen=True)
class Run:
    """A run whose speed was published.

    tflops, tokens: published TFLOP/s, or tokens per second, of a device; one of the two is given. fused: the run's
    attention did not write its scores to memory. assumed: settings that the publication does not give.
    """

    source: str
    name: str
    cluster: Cluster
    config: Config
    devices: int
    tflops: float = 0.0
    tokens: float = 0.0
    fused: bool = True
    assumed: str = ""

    @property
    def nodes(self) -> int:
        """Number of nodes that the run used."""
        return -(-self.devices // self.cluster.devices_per_node)

    @property
    def layout(self) -> str:
        """Sizes of the tensor, pipeline and data axes."""
        p = self.config.parallel
        return f"{p.model_parallel_size} x {p.stages} x {p.data_parallel_size(self.devices)}"


@dataclass(frozen=True)
class Compared:
    """Published and predicted TFLOP/s per device of a run."""

    run: Run
    parameters: int
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative error of the predicted speed: positive if the prediction is too fast."""
        return self.predicted / self.published - 1


def _read(name: str) -> Any:
    return json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def paper(row: dict[str, Any]) -> Run:
    """Return a row of published.json: GPT-2 with Adam in mixed precision.

    The settings use ZeRO 1. The published runs did not shard the optimizer, but a step takes about the same time.
    """
    replicas = row["devices"] // row["tensor"] // row["stages"]
    config = with_values(
        Config(),
        {
            "family": "gpt2", "num_layers": row["layers"], "hidden_size": row["hidden"],
            "num_attention_heads": row["heads"], "seq_length": row["sequence"], "vocab_size": row["vocabulary"],
            "model_parallel_size": row["tensor"], "pipe_parallel_size": row["stages"] if row["stages"] > 1 else 0,
            "sequence_parallel": False, "batch_size": row["micro"], "gas": row["batch"] // replicas // row["micro"],
            "checkpoint_activations": True, "zero_stage": 1, "precision": "bf16",
        },
    )  # fmt: skip
    cluster = load_cluster(row["cluster"])
    assumed = row.get("assumed", "")
    tflops = row["tflops"]
    return Run(row["source"], row["name"], cluster, config, row["devices"], tflops=tflops, fused=False, assumed=assumed)


def foundry(row: list[Any]) -> Run:
    """Return a row of published_llm_foundry.json."""
    model, sequence, devices, device, micro, gas, recompute, zero, tokens = row
    layers, hidden, heads = FOUNDRY[model]
    config = with_values(
        Config(),
        {
            "family": "gpt2", "num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
            "seq_length": sequence, "max_position_embeddings": sequence, "vocab_size": 50368, "hidden_bias": False,
            "hidden_dropout": 0.0, "attention_dropout": 0.0, "batch_size": micro, "gas": gas, "zero_stage": zero,
            "checkpoint_activations": recompute, "precision": "bf16",
        },
    )  # fmt: skip
    cluster = load_cluster(device.split("_")[0])
    if device == "a100_40":
        cluster = replace(cluster, name="a100 40 GB", memory_bandwidth=A100_40_BANDWIDTH)
    return Run("llm-foundry", f"MPT {model}, {sequence:,} tokens", cluster, config, devices, tokens=tokens)


def preset(row: dict[str, Any]) -> Run:
    """Return a row of published_presets.json. bandwidth: that of the run's devices, if it is not the cluster's."""
    config = parse_any_family(
        ["--config", str(ROOT / f"configs/models/{row['preset']}.json"), "--vocab-size", "128256"]
    )
    config = with_values(
        config,
        {
            "batch_size": row["micro"], "gas": row["gas"], "zero_stage": row["zero"], "precision": "bf16",
            "model_parallel_size": row["tensor"], "sequence_parallel": row["tensor"] > 1,
            "checkpoint_activations": row["recompute"], "expert_parallel_size": row.get("expert", 1),
            "seq_length": row.get("sequence", config.data.seq_length),
        },
    )  # fmt: skip
    cluster = load_cluster(row["cluster"])
    cluster = replace(cluster, memory_bandwidth=row.get("bandwidth", cluster.memory_bandwidth))
    assumed = row.get("assumed", "")
    return Run(row["source"], row["preset"], cluster, config, row["devices"], tokens=row["tokens"], assumed=assumed)


PAPERS = tuple(paper(row) for row in _read("published.json"))
LLM_FOUNDRY = tuple(foundry(row) for row in _read("published_llm_foundry.json"))
PRESETS = tuple(preset(row) for row in _read("published_presets.json"))


def compare(run: Run) -> Compared:
    """Predict the speed of a published run."""
    resolved = resolve(run.config, run.devices, True)
    efficiency = DEFAULT if run.fused else UNFUSED
    cost = cost_of(run.config, resolved, run.devices, run.cluster, stages_of(run.config), efficiency)
    published = run.tflops or cost.done_flops / cost.tokens * run.tokens / 1e12
    return Compared(run, parameters(run.config), published, cost.tflops)


def median_error(found: Sequence[Compared]) -> float:
    """Return the median of the relative errors, without their signs."""
    return statistics.median(abs(each.error) for each in found)


def within(found: Sequence[Compared], bound: float) -> float:
    """Return the fraction of runs whose relative error is at most `bound`."""
    return sum(abs(each.error) <= bound for each in found) / len(found)


def row_of(each: Compared) -> list[Any]:
    """Return the row of a run in a table of docs/scaling.md."""
    run = each.run
    devices = f"{run.devices:,} {run.cluster.name}"
    return [
        run.source,
        run.name,
        devices,
        run.layout,
        round(each.published),
        round(each.predicted),
        f"{each.error:+.0%}",
    ]


def compared() -> dict[str, list[Compared]]:
    """Return the compared runs by source and, for llm-foundry, by device and by whether they span nodes."""
    found: dict[str, list[Compared]] = {}
    for run in (*PAPERS, *LLM_FOUNDRY, *PRESETS):
        name = run.source.split(",")[0].split(" 20")[0]
        if run.source == "llm-foundry":
            name = f"llm-foundry, {run.cluster.name}, {'one node' if run.nodes == 1 else 'several nodes'}"
        found.setdefault(name, []).append(compare(run))
    return found


def group_rows() -> list[list[Any]]:
    """Return the rows of the table published-groups: the distribution of the errors by group of runs."""
    rows = []
    for name, found in compared().items():
        worst = max(found, key=lambda each: abs(each.error)).error
        rows.append([name, len(found), f"{median_error(found):.1%}", f"{within(found, 0.2):.0%}", f"{worst:+.0%}"])
    return rows


def worst_rows() -> list[list[Any]]:
    """Return the rows of the table published-worst: the ten runs with the largest errors, each with its reason."""
    every = []
    for found in compared().values():
        every += found
    worst = sorted(every, key=lambda each: -abs(each.error))[:10]
    rows = []
    for each in worst:
        row = row_of(each)
        model, devices = row[1:3]
        rows.append([*row, REASONS[model, devices]])
    return rows


def main() -> None:
    """Print the rows of the tables in benchmarks/results.toml."""
    single = [row_of(compare(run)) for run in (*PAPERS, *PRESETS)]
    tables = {"published": single, "published-groups": group_rows(), "published-worst": worst_rows()}
    for name, rows in tables.items():
        print(f"[table.{name}]")
        for row in rows:
            print(f"    {json.dumps(row)},")


if __name__ == "__main__":
    main()
