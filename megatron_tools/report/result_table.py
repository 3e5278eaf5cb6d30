"""Print a run's result as one row of a table: name, size, perplexity, speed, sample length and steps.

The row is also written to result.md in the run's folder. The perplexity is taken from the last evaluation.
The speed is the median over the logged training lines except the first.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch

from data_utils.cli import Parser, local_path, run
from megatron.atomic import write_text
from megatron.config.command_line import from_file
from megatron.ranks import device

from .runs import read_metrics

EXAMPLES = """\
  python tools/result_table.py --run-dir runs/full_345M --params 345M --ranks 8"""
COLUMNS = ("NAME", "params", "PPL", "samples/s", "seq_len", "Steps")


def row(rows: list[dict[str, Any]], seq_length: int, params: str, ranks: int) -> list[str]:
    """Return the cells of the table row. Raises ValueError if metrics.jsonl has no training row yet.

    rows: content of metrics.jsonl.
    """
    training = [each for each in rows if each["split"] == "train"]
    if not training:
        raise ValueError("metrics.jsonl has no training row yet")
    perplexities = [each["ppl"] for each in rows if each["split"] == "valid"]
    speeds = [each["tokens_per_second"] for each in training[1:] or training]
    return [
        f"{ranks}p-{_device()}",
        params,
        f"{perplexities[-1]:.3f}" if perplexities else "-",
        f"{statistics.median(speeds) / seq_length:.4g}",
        str(seq_length),
        str(training[-1]["iteration"]),
    ]


def _device() -> str:
    here = device.current()
    if here.type == "cpu":
        return "CPU"
    module = torch.get_device_module(here)
    name: str = module.get_device_name(here) if hasattr(module, "get_device_name") else here.type.upper()
    return name.replace("NVIDIA ", "").replace(" ", "-")


def main(args: argparse.Namespace) -> None:
    run_dir = Path(args.run_dir)
    rows = read_metrics(run_dir)
    config = from_file(str(run_dir / "config.json"))
    lines = [COLUMNS, ["---"] * len(COLUMNS), row(rows, config.data.seq_length, args.params, args.ranks)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"
    print(table, end="")
    write_text(run_dir / "result.md", table)


def build_parser() -> Parser:
    parser = Parser(__doc__ or "", EXAMPLES)
    parser.add_argument("--run-dir", type=local_path, required=True, help="folder of a run")
    parser.add_argument("--params", required=True, help="text of the params column, e.g. 345M")
    parser.add_argument("--ranks", type=int, required=True, help="number of ranks of the run")
    return parser


def cli() -> None:
    run(main, build_parser())


if __name__ == "__main__":
    cli()
