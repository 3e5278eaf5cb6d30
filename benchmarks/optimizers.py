"""Compare Muon with AdamW, each with its best learning rate: validation loss over tokens and over time.

    python benchmarks/optimizers.py --data-path runs/gpt2/data/corpus_text_document \\
        --vocab-file runs/gpt2/tokenizer.model --runs runs/optimizers --out docs/images/muon.png \\
        -- --num-layers 4 --hidden-size 256 --train-iters 500

Each optimizer trains with all --lrs and one seed, then with its best learning rate and the other seeds. A run of AdamW
and a run of Muon train at the same time, on one core each, so that background load affects both alike. Flags after --
are those of pretrain_gpt2.py. Finished runs in --runs are not repeated.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from _alternate import ROOT, new_parser, spread

COLOURS = {"adam": "#1d4ed8", "muon": "#c2410c"}
NAMES = {"adam": "AdamW", "muon": "Muon"}


class Curve(NamedTuple):
    """Validation losses of a run.

    tokens, losses: consumed tokens and loss at each evaluation. rate: median number of tokens per second.
    """

    tokens: list[int]
    losses: list[float]
    rate: float


def read(run_dir: Path) -> Curve:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    train = [row for row in rows if row["split"] == "train"]
    at = {row["iteration"]: row["consumed_tokens"] for row in train}
    valid = {row["iteration"]: row["lm_loss"] for row in rows if row["split"] == "valid" and row["iteration"] in at}
    rate = statistics.median(row["tokens_per_second"] for row in train if row.get("tokens_per_second"))
    return Curve([at[i] for i in valid], list(valid.values()), rate)


def run(name: str, lr: float, seed: int, args: Any) -> "subprocess.Popen[bytes] | None":
    """Start a run, unless it is finished already."""
    folder = folder_of(name, lr, seed, args)
    if (folder / "finished").exists():
        return None
    command = [sys.executable, "pretrain_gpt2.py", "--data-path", args.data_path, "--vocab-file", args.vocab_file]
    command += ["--optimizer", name, "--lr", str(lr), "--min-lr", str(lr / 100), "--warmup", "0.1", "--seed", str(seed)]
    command += ["--save-interval", "0", "--no-save-at-end", "--no-tensorboard", "--run-dir", str(folder), *args.flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)


def folder_of(name: str, lr: float, seed: int, args: Any) -> Path:
    return Path(args.runs) / f"{name}-{lr:g}-{seed}"


def all_runs(pairs: Sequence[dict[str, tuple[float, int]]], args: Any) -> None:
    """Do the runs of each pair, optimizer -> (learning rate, seed), at the same time."""
    for pair in pairs:
        started = {name: run(name, *each, args) for name, each in pair.items()}
        for name, process in started.items():
            if process and process.wait():
                raise RuntimeError(f"the run {folder_of(name, *pair[name], args)} failed")
            (folder_of(name, *pair[name], args) / "finished").touch()


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--data-path", required=True)
    parser.add_argument("--vocab-file", required=True)
    parser.add_argument("--runs", required=True, help="folder for the runs")
    parser.add_argument("--lrs", type=float, nargs="+", default=[5e-4, 1e-3, 2e-3, 4e-3, 8e-3])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", required=True, help="PNG file")
    parser.add_argument("--title", default="")
    parser.add_argument("flags", nargs="*")
    args = parser.parse_args()
    all_runs([{name: (lr, 1) for name in NAMES} for lr in args.lrs], args)
    finals = {name: {lr: read(folder_of(name, lr, 1, args)).losses[-1] for lr in args.lrs} for name in NAMES}
    # A NaN or Inf loss is never the best.
    best = {name: min(found, key=lambda lr: found[lr] if found[lr] < 1e9 else 1e9) for name, found in finals.items()}
    seeds = range(1, args.seeds + 1)
    all_runs([{name: (best[name], seed) for name in NAMES} for seed in seeds], args)
    curves = {name: [read(folder_of(name, best[name], seed, args)) for seed in seeds] for name in NAMES}
    print("| optimizer | " + " | ".join(f"lr {lr:g}" for lr in args.lrs) + f" | best, {args.seeds} seeds | tokens/s |")
    print("|" + " --- |" * (len(args.lrs) + 3))
    for name, found in finals.items():
        last, rates = [c.losses[-1] for c in curves[name]], [c.rate for c in curves[name]]
        cells = [f"{found[lr]:.3f}" for lr in args.lrs] + [spread(last, ".3f"), spread(rates, ",.0f")]
        print(f"| {NAMES[name]} | " + " | ".join(cells) + " |")
    draw(curves, finals, best, args)


def draw(curves: dict[str, list[Curve]], finals: Any, best: Any, args: Any) -> None:
    """Plot final losses by learning rate, and losses over tokens and over time as the mean and range of the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.8), dpi=110, layout="constrained")
    axes = figure.subplots(1, 3)
    for name, colour in COLOURS.items():
        axes[0].plot(list(finals[name]), list(finals[name].values()), "o-", color=colour, label=NAMES[name])
        columns = list(zip(*(c.losses for c in curves[name]), strict=True))
        mean, low, high = ([f(column) for column in columns] for f in (statistics.mean, min, max))
        tokens = curves[name][0].tokens
        rate = statistics.median(c.rate for c in curves[name])
        for axis, x in ((axes[1], [t / 1e6 for t in tokens]), (axes[2], [t / rate for t in tokens])):
            axis.plot(x, mean, color=colour, label=f"{NAMES[name]}, lr {best[name]:g}")
            axis.fill_between(x, low, high, color=colour, alpha=0.25, linewidth=0)
    axes[0].set_xscale("log")
    axes[0].set_xticks(args.lrs, [f"{lr:g}" for lr in args.lrs])
    axes[0].minorticks_off()
    for axis, label in zip(axes, ("learning rate", "million tokens", "seconds on one core"), strict=True):
        axis.set_xlabel(label)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    axes[0].set_ylabel("validation loss")
    figure.suptitle(args.title, fontsize=11)
    figure.savefig(args.out)


if __name__ == "__main__":
    main()
