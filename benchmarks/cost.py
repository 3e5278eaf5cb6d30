"""Time of a step as the work per step grows, and time from the launch of a run to the end of its first step.

    python benchmarks/cost.py --sections linear startup

linear: seconds of a step as one of three numbers grows: layers, samples in a micro-batch, or micro-batches in a step;
also the least-squares line and its R². startup: seconds from the launch of two ranks to the end of the first step.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import _engine
import numpy as np
from _alternate import ROOT, new_parser


def step_seconds(layers: int, batch: int, gas: int, rounds: int) -> float:
    """Return the median seconds of a step of the engine that `pretrain()` uses. gas: micro-batches in a step."""
    step = _engine.ours(
        f"--num-layers {layers} --hidden-size 256 --num-attention-heads 4 --seq-length 128 --vocab-size 8064 "
        f"--hidden-dropout 0 --attention-dropout 0 --batch-size {batch} --gas {gas} --precision fp32"
    ).step
    found = []
    for round_ in range(rounds + 2):
        begin = time.perf_counter()
        step()
        if round_ > 1:
            found.append(time.perf_counter() - begin)
    return statistics.median(found)


def linear(rounds: int) -> None:
    axes: dict[str, tuple[list[int], Any]] = {
        "layers": ([2, 4, 8, 12], lambda n: step_seconds(n, 4, 1, rounds)),
        "tokens per micro-batch / 128": ([2, 4, 8, 16], lambda n: step_seconds(4, n, 1, rounds)),
        "micro-batches": ([1, 2, 4, 8], lambda n: step_seconds(4, 4, n, rounds)),
    }
    print("| what varies | ms per step | ms per added unit | constant part, ms | R² |\n| --- | --- | --- | --- | --- |")
    for name, (values, measure) in axes.items():
        seconds = np.array([measure(n) for n in values])
        slope, rest = np.polyfit(values, seconds, 1)
        residue = seconds - (slope * np.array(values) + rest)
        r2 = 1 - (residue**2).sum() / ((seconds - seconds.mean()) ** 2).sum()
        times = ", ".join(f"{n}: {1e3 * s:.0f}" for n, s in zip(values, seconds, strict=True))
        print(f"| {name} | {times} | {1e3 * slope:.1f} | {1e3 * rest:.1f} | {r2:.4f} |")


def startup(rounds: int) -> None:
    from data_utils.documents import read_texts
    from data_utils.indexed_writer import IndexedDatasetBuilder
    from data_utils.tokenizer_training import train_sentencepiece

    with tempfile.TemporaryDirectory() as folder:
        train_sentencepiece(read_texts([str(ROOT / "corpus" / "sample.jsonl")]), f"{folder}/t.model", 3000)
        with IndexedDatasetBuilder(f"{folder}/x", np.uint16) as builder:
            builder.add_document(np.arange(3, 2900))
        flags = (
            f"--data-path {folder}/x --vocab-file {folder}/t.model --split 1 --train-iters 1 --eval-iters 0 "
            "--save-interval 0 --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 "
            "--pipe-parallel-size 2 --no-tensorboard"
        )
        launch = [sys.executable, "tools/launch.py", "--standalone", "--nproc-per-node", "2"]
        whole = []
        for round_ in range(rounds):
            begin = time.perf_counter()
            process = subprocess.Popen(
                [*launch, "pretrain_gpt2.py", *flags.split(), "--run-dir", f"{folder}/{round_}"],
                cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
            assert process.stdout is not None
            for line in process.stdout:
                if "| iteration " in line and " 1/1 " in line:
                    whole.append(time.perf_counter() - begin)
            process.wait()
    if len(whole) < rounds:
        sys.exit(f"cost.py: only {len(whole)} of {rounds} runs logged their first step")
    ordered = sorted(whole)
    print(
        "from the launch of two ranks to the end of the first step, including imports: "
        f"{statistics.median(ordered):.1f} s ({ordered[0]:.1f} to {ordered[-1]:.1f})"
    )


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--sections", nargs="+", choices=("linear", "startup"), default=["linear", "startup"])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if "startup" in args.sections:
        startup(args.rounds)
    if "linear" in args.sections:
        linear(args.rounds)


if __name__ == "__main__":
    main()
