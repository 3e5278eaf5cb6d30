"""Run every benchmark with one command; write the tables as Markdown and JSON, and the ratios as a bar chart.

    make bench
    make bench SECTIONS="train-fp32 dp tp"
    python benchmarks/suite.py --list

A section is a script of this folder with its arguments, run in its own process. A section that fails is reported and
the others continue. The numbers in docs/benchmarks.md were measured with this script.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from _alternate import ROOT, new_parser

LLAMA_SMALL = "--model llama --ff 2048"
MIXTRAL_SMALL = "--model mixtral --layers 4 --ff 1024 --no-compile --batch 8"
MEMORY = "--batch 8 --steps 1 --no-compile"
PEERS = "--only Hugging_Face nanoGPT-style,_compiled"
T5_SMALL = "--model t5 --layers 6 --hidden 512 --heads 8 --vocab 32128 --batch 8"


def _switched(model: str) -> str:
    """Return --flags= arguments; each disables one optimisation, or enables one that is off by default."""
    flags = ["--cpu-matmul_torch", "--no-keep-freed-memory", "--reference-ops_cross-entropy", "--logits-chunk-size_512"]
    if model == "t5":
        flags += [
            f"--reference-ops_{name}" for name in ("biased-attention", "gated-gelu", "relative-positions", "rms-norm")
        ]
    else:
        flags += ["--checkpoint-attention", "--compile"]
    return " ".join(f"--flags={each}" for each in flags)


SECTIONS = {
    "train-fp32": "run.py --precision fp32 --steps 1",
    "train-bf16": "run.py --precision bf16 --steps 1",
    "train-llama": f"run.py {LLAMA_SMALL} --steps 1",
    "train-llama-bf16": f"run.py {LLAMA_SMALL} --precision bf16 --steps 1 --no-compile",
    "train-mixtral": f"run.py {MIXTRAL_SMALL} --steps 1",
    "train-mixtral-bf16": f"run.py {MIXTRAL_SMALL} --precision bf16 --steps 1",
    "train-t5": f"run.py {T5_SMALL} --steps 1",
    "train-t5-bf16": f"run.py {T5_SMALL} --precision bf16 --steps 1 --no-compile",
    "memory-fp32": f"run.py --precision fp32 {MEMORY} {PEERS}",
    "memory-bf16": f"run.py --precision bf16 {MEMORY} {PEERS}",
    "memory-llama": f"run.py {LLAMA_SMALL} {MEMORY}",
    "memory-llama-bf16": f"run.py {LLAMA_SMALL} --precision bf16 {MEMORY}",
    "switches-gpt2": f"run.py --steps 1 --no-compile --only none {_switched('gpt2')}",
    "switches-t5": f"run.py {T5_SMALL} --batch 4 --steps 1 --no-compile --only none {_switched('t5')}",
    "switches-muon": "run.py --steps 1 --no-compile --only none --flags=--optimizer_muon "
    "--flags=--optimizer_muon_--muon-ns-dtype_bf16",
    "dp": "parallel.py --kind dp",
    "ep": "parallel.py --kind ep",
    "latency": "latency.py",
    "switches-dp": "parallel.py --kind dp --ours-only --flags=--no-overlap-grad-reduce",
    "switches-dp-bf16": "parallel.py --kind dp --precision bf16 --ours-only --flags=--no-overlap-grad-reduce",
    "switches-pp-dp": "parallel.py --kind pp-dp --flags=--no-overlap-grad-reduce",
    "switches-pp-dp-bf16": "parallel.py --kind pp-dp --precision bf16 --flags=--no-overlap-grad-reduce",
    "tp": "parallel.py --kind tp",
    "switches-tp": "parallel.py --kind tp --ours-only --flags=--no-async-tensor-model-parallel-allreduce "
    "--flags=--sequence-parallel",
    "cp": "parallel.py --kind cp --seq 4096 --batch 1 --layers 2 --vocab 4000",
    "pp": "parallel.py --kind pp",
    "pp-same-layers": "pipeline_layers.py",
    "pp-two-gradients": "pipeline_layers.py --two-gradients",
    "pp-4": "pipeline_layers.py --stages 4",
    "engine": "pipeline.py --stages 2 --megabytes 1",
    "engine-4": "pipeline.py --stages 4 --megabytes 1 --schedules all",
    "cost": "cost.py --sections linear",
    "startup": "cost.py --sections startup",
    "many-ranks": "many_ranks.py --ranks 1024 8192",
    "data": "data.py",
    "checkpoint": "checkpoint.py",
    "checkpoint-2": "checkpoint.py --ranks 2",
    "gpu": "gpu.py",
}
PACKAGES = ("torch", "deepspeed", "transformers", "megatron-core", "sentencepiece", "tokenizers")
NUMBER = r"[-+]?[\d,]*\.?\d+"
SPREAD = re.compile(rf"({NUMBER})\s?%? \(({NUMBER})\s?%? to ({NUMBER})\s?%?\)")


def here() -> dict[str, str]:
    """Return the date, the device and the package versions."""
    cpu = next(
        (line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine()
    )
    found = {
        "date": date.today().isoformat(),
        "device": f"{os.cpu_count()} cores, {cpu}",
        "python": platform.python_version(),
    }
    import torch

    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def measure(name: str, more: list[str]) -> dict[str, Any]:
    """Run one section, printing its output as it runs; return its command, exit status, seconds, output and tables."""
    script, *arguments = SECTIONS[name].split()
    command = [f"benchmarks/{script}", *(a.replace("_", " ") for a in arguments), *more]
    print(f"\n## {name}\n\n`python {' '.join(command)}`\n", flush=True)
    begin, said = time.perf_counter(), []
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        print(line, end="", flush=True)
    code = process.wait()
    if code:
        print(f"\n{name}: exited with {code}", file=sys.stderr)
    text = "".join(said)
    return {
        "section": name, "command": "python " + " ".join(command), "exit": code,
        "seconds": round(time.perf_counter() - begin, 1), "text": text, "tables": tables(text),
    }  # fmt: skip


def tables(text: str) -> list[list[dict[str, str]]]:
    """Return the Markdown tables in a section's output; each row is {column: cell}."""
    found: list[list[dict[str, str]]] = []
    head: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            head = []
        elif not head:
            head = cells
            found.append([])
        elif set(cells[0]) - set("-: "):
            found[-1].append(dict(zip(head, cells, strict=False)))
    return [rows for rows in found if rows]


def bars(rows: list[dict[str, str]]) -> tuple[str, list[tuple[str, float, float, float]]]:
    """Return the title of a column, and each row's (name, median, lowest, highest) in this column.

    The column is "ours / it" (the ratio of speeds) if there is one, else the first column whose cells have the form
    `median (lowest to highest)`.
    """
    columns = sorted(list(rows[0])[1:], key=lambda column: "ours / it" not in column)
    for column in columns:
        found = [(next(iter(row.values())), match) for row in rows if (match := SPREAD.search(row.get(column, "")))]
        if found:
            numbers = [(name, *(float(n.replace(",", "")) for n in match.groups())) for name, match in found]
            return column, numbers  # type: ignore[return-value]
    return "", []


def draw(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = [(r["section"], *bars(rows)) for r in results for rows in r["tables"]]
    panels = [panel for panel in panels if panel[2]]
    if not panels:
        return
    heights = [1.1 + 0.42 * len(rows) for _, _, rows in panels]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(9, sum(heights)), height_ratios=heights, squeeze=False, layout="constrained"
    )
    for axis, (section, column, rows) in zip(axes[:, 0], panels, strict=True):
        names, middle = [row[0] for row in rows], [row[1] for row in rows]
        spread = [[row[1] - row[2] for row in rows], [row[3] - row[1] for row in rows]]
        colors = ["#c44e52" if name.startswith("ours") else "#4c72b0" for name in names]
        axis.barh(names, middle, xerr=spread, color=colors, capsize=3, height=0.65)
        axis.invert_yaxis()
        axis.set_title(f"{section}: {column}", loc="left", fontsize=10)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        if "ours / it" in column:
            axis.axvline(1, color="black", linewidth=0.8, linestyle=":")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--sections", nargs="*", help="sections to run (default: all)")
    parser.add_argument(
        "--out", default="runs/benchmarks", help="folder for benchmarks.md, .json and .png (default: runs/benchmarks)"
    )
    parser.add_argument("--list", action="store_true", help="show the sections and their commands")
    parser.add_argument(
        "more", nargs=argparse.REMAINDER, help="arguments after -- are passed to each script, e.g. -- --rounds 3"
    )
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{name:18} python benchmarks/{command}" for name, command in SECTIONS.items()))
        return
    unknown = [name for name in args.sections or [] if name not in SECTIONS]
    if unknown:
        parser.error(f"no section {unknown[0]!r}; choose from {', '.join(SECTIONS)}")
    about = here()
    print("# Benchmarks\n\n" + ", ".join(f"{key} {value}" for key, value in about.items()))
    results = [measure(name, [a for a in args.more if a != "--"]) for name in args.sections or SECTIONS]
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "benchmarks.json").write_text(json.dumps({"here": about, "results": results}, indent=1), encoding="utf-8")
    parts = [f"## {r['section']}\n\n`{r['command']}`, {r['seconds']:.0f} s\n\n{r['text']}" for r in results]
    lines = ["# Benchmarks", ", ".join(f"{key} {value}" for key, value in about.items()), *parts]
    (out / "benchmarks.md").write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    draw(results, out / "benchmarks.png")
    print(f"\nwritten to {out}: benchmarks.md, benchmarks.json, benchmarks.png")
    sys.exit(any(r["exit"] for r in results))


if __name__ == "__main__":
    main()
