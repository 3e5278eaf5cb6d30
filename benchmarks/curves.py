"""Plot the loss curves of two or more runs, and the difference between each run and the first.

    python benchmarks/curves.py fp32=runs/a bf16=runs/b "fp32, another seed=runs/c" --out docs/images/bf16.png

Runs must have logged every iteration (--log-interval 1). Losses are averaged over `--window` iterations before they
are compared. A run with another seed shows how much of a difference is noise.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def losses(run_dir: str) -> NDArray[np.float64]:
    rows = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return np.array([row["lm_loss"] for row in rows if row["split"] == "train"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="runs to plot, each as NAME=RUN_DIR")
    parser.add_argument("--out", required=True)
    parser.add_argument("--window", type=int, default=25)
    args = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    means = {}
    for each in args.runs:
        name, _, run_dir = each.partition("=")
        curve = losses(run_dir)
        means[name] = curve[: len(curve) // args.window * args.window].reshape(-1, args.window).mean(1)
    first = next(iter(means))
    shortest = min(map(len, means.values()))
    at = (np.arange(shortest) + 0.5) * args.window
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=[2, 1], layout="constrained")
    print(f"| run | final loss | mean distance from {first} | greatest distance |\n| --- | --- | --- | --- |")
    for name, mean in means.items():
        above.plot(at, mean[:shortest], label=name, linestyle="--" if "seed" in name else "-")
        difference = mean[:shortest] - means[first][:shortest]
        if name != first:
            below.plot(at, difference, label=f"{name} minus {first}", color=above.lines[-1].get_color())
        print(
            f"| {name} | {mean[shortest - 1]:.4f} | {np.abs(difference).mean():.4f} | {np.abs(difference).max():.4f} |"
        )
    above.set_ylabel(f"loss, mean of {args.window} iterations")
    below.set_ylabel("difference")
    below.set_xlabel("iteration")
    below.axhline(0, color="black", linewidth=0.8)
    for axis in (above, below):
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
