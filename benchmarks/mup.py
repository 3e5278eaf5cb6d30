"""Compare the best learning rates of a narrow and a wide GPT-2, without muP and with it.

    python benchmarks/mup.py --data-path runs/data --vocab-file runs/tokenizer.model --out docs/images/mup.png

Each run has a short warm-up and a linear decay to 0. The figure shows the mean loss of the last fifth of a run's
iterations.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SIZES = "--num-layers 2 --seq-length 64 --batch-size 8 --hidden-dropout 0 --attention-dropout 0 --warmup 0.1"
QUIET = "--precision fp32 --log-interval 1 --eval-iters 0 --save-interval 0 --no-tensorboard --lr-decay-style linear"
HEAD = 16  # width of an attention head


def final_loss(width: int, lr: float, base: int | None, args: argparse.Namespace) -> float:
    """Train one model, and return the mean loss of the last fifth of its iterations. base: --mup-base-hidden-size."""
    with tempfile.TemporaryDirectory() as run_dir:
        flags = f"--hidden-size {width} --num-attention-heads {width // HEAD} --lr {lr} --train-iters {args.iters}"
        flags += f" --mup-base-hidden-size {base}" if base else ""
        files = ["--run-dir", run_dir, "--vocab-file", args.vocab_file, "--data-path", args.data_path, "--split", "1"]
        command = [sys.executable, "pretrain_gpt2.py", *f"{SIZES} {QUIET} {flags}".split(), *files]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        rows = (Path(run_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [json.loads(row)["lm_loss"] for row in rows][-max(args.iters // 5, 1) :]
    return float(sum(losses) / len(losses))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-path", required=True)
    parser.add_argument("--vocab-file", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--lrs", type=float, nargs="+", default=[0.001, 0.003, 0.01, 0.03, 0.1])
    parser.add_argument("--iters", type=int, default=300)
    args = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(8.4, 3.6), dpi=130, sharey=True, layout="constrained")
    print("| muP | width | " + " | ".join(f"{lr:g}" for lr in args.lrs) + " |")
    print("| --- | --- |" + " --- |" * len(args.lrs))
    for panel, mup in zip(panels, (False, True), strict=True):
        for width in args.widths:
            losses = [final_loss(width, lr, args.widths[0] if mup else None, args) for lr in args.lrs]
            cells = " | ".join(f"{loss:.3f}" for loss in losses)
            print(f"| {'with' if mup else 'without'} | {width} | {cells} |", flush=True)
            best = min(range(len(losses)), key=lambda i: losses[i])
            (line,) = panel.semilogx(args.lrs, losses, marker="o", markersize=4, label=f"--hidden-size {width}")
            panel.plot(args.lrs[best], losses[best], "*", markersize=14, color=line.get_color())
        panel.set_title("with muP" if mup else "without muP")
        panel.set_xlabel("--lr")
        panel.set_xticks(args.lrs, labels=[f"{lr:g}" for lr in args.lrs])
        panel.minorticks_off()
        panel.grid(alpha=0.25)
    panels[0].set_ylabel(f"loss after {args.iters} iterations")
    panels[1].legend()
    figure.savefig(args.out)


if __name__ == "__main__":
    main()
