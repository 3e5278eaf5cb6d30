"""Peak memory predicted by `tools/plan.py`, compared with the peak measured on gloo ranks.

    python benchmarks/plan_memory.py
    python benchmarks/plan_memory.py --only gpt2-bf16-zero1 t5-fp32-pp4
    python benchmarks/plan_memory.py --rows tests/unit/measured_memory.json

An allocator of torch counts every allocation and release of a tensor's memory on each rank, from before the model is
built to the end of the third step; compiling it needs a C++ compiler and ninja. The measured number is the peak of live
bytes on the rank where this peak is highest. Memory of Python and libraries is not included. The prediction is the
planner's total for the stage that needs the most memory. DeepSpeed's ZeRO 2 and 3 allocate a bucket of
reduce_bucket_size elements. This benchmark sets a small reduce_bucket_size, since a bucket of the default size would
dominate the memory of these models.

--rows FILE measures the random settings of tests/unit/measured_memory.json instead, and prints rows of such a file.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _alternate import ROOT, leave, new_parser

GPT2 = (
    "--family gpt2 --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --vocab-size 2000 "
    "--batch-size 4 --hidden-dropout 0 --attention-dropout 0"
)
T5 = (
    "--family t5 --num-layers 3 --hidden-size 256 --num-attention-heads 4 --enc-seq-length 256 --dec-seq-length 64 "
    "--objective prefix-lm --seq-length 256 --vocab-size 2000 --batch-size 4 --hidden-dropout 0 --attention-dropout 0"
)
LLAMA = f"--config {ROOT}/configs/models/llama_tiny.json --vocab-size 2000 --seq-length 256 --batch-size 4"
EXPERTS = (
    f"{GPT2} --num-experts 8 --experts-per-token 2 --expert-ff-hidden-size 256 --num-shared-experts 1 --activation "
    "swiglu --normalization rmsnorm --no-hidden-bias"
)
CASES: dict[str, tuple[int, str]] = {
    "gpt2-fp32": (1, f"{GPT2} --precision fp32"),
    "gpt2-fp32-dropout": (1, f"{GPT2} --precision fp32 --hidden-dropout 0.1 --attention-dropout 0.1"),
    "gpt2-fp32-recompute": (2, f"{GPT2} --precision fp32 --checkpoint-activations"),
    "gpt2-fp32-zero1": (2, f"{GPT2} --precision fp32 --zero-stage 1"),
    "gpt2-fp32-zero2": (2, f"{GPT2} --precision fp32 --zero-stage 2 --gas 2"),
    "gpt2-fp32-zero3": (2, f"{GPT2} --precision fp32 --zero-stage 3 --checkpoint-activations"),
    "gpt2-bf16-zero1": (2, f"{GPT2} --precision bf16 --zero-stage 1"),
    "gpt2-bf16-zero2": (2, f"{GPT2} --precision bf16 --zero-stage 2"),
    "gpt2-bf16-zero3": (4, f"{GPT2} --precision bf16 --zero-stage 3"),
    "gpt2-fp16-zero1": (2, f"{GPT2} --precision fp16 --zero-stage 1"),
    "gpt2-fp16-pp2": (2, f"{GPT2} --precision fp16 --pipe-parallel-size 2 --gas 4 --zero-stage 1"),
    "gpt2-bf16-zero1-deepspeed": (2, f"{GPT2} --precision bf16 --zero-stage 1 --no-overlap-grad-reduce"),
    "gpt2-fp32-gpipe": (2, f"{GPT2} --precision fp32 --pipe-parallel-size 2 --gas 4 --pipeline-schedule gpipe"),
    "gpt2-fp32-zb-h1": (2, f"{GPT2} --precision fp32 --pipe-parallel-size 2 --gas 4 --pipeline-schedule zb-h1"),
    "llama-fp32-qk-norm-recompute-qkv": (1, f"{LLAMA} --precision fp32 --qk-norm --recompute-modules qkv"),
    "llama-fp32-qk-norm": (1, f"{LLAMA} --precision fp32 --qk-norm"),
    "llama-fp32-chunks": (
        1, f"{LLAMA} --precision fp32 --sliding-window 64 --checkpoint-attention --logits-chunk-size 64 --ema-decay "
        "0.99 --z-loss 0.01",
    ),
    "gpt2-fp32-chunks": (1, f"{GPT2} --precision fp32 --vocab-size 16000 --logits-chunk-size 128 --z-loss 0.01"),
    "gpt2-fp32-unfused": (1, f"{GPT2} --precision fp32 --reference-ops cross-entropy"),
    "gpt2-fp32-vocab": (1, f"{GPT2} --precision fp32 --vocab-size 16000"),
    "gpt2-bf16-vocab": (2, f"{GPT2} --precision bf16 --zero-stage 1 --vocab-size 16000"),
    "gpt2-fp32-tp2": (2, f"{GPT2} --precision fp32 --model-parallel-size 2"),
    "gpt2-fp32-pp2": (2, f"{GPT2} --precision fp32 --pipe-parallel-size 2 --gas 4"),
    "gpt2-bf16-pp4": (4, f"{GPT2} --precision bf16 --pipe-parallel-size 4 --gas 8 --zero-stage 1"),
    "gpt2-bf16-pp2-recompute": (
        4, f"{GPT2} --precision bf16 --pipe-parallel-size 2 --gas 4 --zero-stage 1 --checkpoint-activations",
    ),
    "t5-fp32": (1, f"{T5} --precision fp32"),
    "t5-fp32-2-5-layers": (1, f"{T5} --precision fp32 --num-layers 2 --num-decoder-layers 5"),
    "t5-bf16-zero1": (2, f"{T5} --precision bf16 --zero-stage 1"),
    "t5-fp32-zero2-recompute": (2, f"{T5} --precision fp32 --zero-stage 2 --checkpoint-activations"),
    "t5-bf16-zero3": (2, f"{T5} --precision bf16 --zero-stage 3"),
    "t5-fp32-pp2-recompute": (2, f"{T5} --precision fp32 --pipe-parallel-size 2 --gas 4 --checkpoint-activations"),
    "t5-fp32-pp4": (4, f"{T5} --precision fp32 --pipe-parallel-size 4 --gas 4"),
    "llama-fp32-zero1": (2, f"{LLAMA} --precision fp32 --zero-stage 1"),
    "experts-fp32": (1, f"{EXPERTS} --precision fp32"),
    "experts-fp32-recompute": (1, f"{EXPERTS} --precision fp32 --checkpoint-activations"),
    "experts-fp32-ep2": (2, f"{EXPERTS} --precision fp32 --expert-parallel-size 2"),
    "experts-fp32-ep2-zero1": (4, f"{EXPERTS} --precision fp32 --expert-parallel-size 2 --zero-stage 1"),
    "experts-bf16-ep2-zero1": (2, f"{EXPERTS} --precision bf16 --expert-parallel-size 2 --zero-stage 1"),
    "experts-fp32-tp2": (2, f"{EXPERTS} --precision fp32 --model-parallel-size 2"),
    "experts-fp32-pp2": (2, f"{EXPERTS} --precision fp32 --pipe-parallel-size 2 --gas 4"),
    "experts-t5-fp32": (1, f"{T5} --num-experts 4 --experts-per-token 1 --precision fp32"),
}  # fmt: skip
BUCKET = 10**6  # elements in DeepSpeed's reduce bucket


def flags_of(case: str, folder: str) -> str:
    """Return the flags of a case; for DeepSpeed's ZeRO also write a ds_config with a small bucket to `folder`."""
    flags = CASES[case][1]
    buckets = ("--zero-stage 2", "--zero-stage 3", "fp16", "--no-overlap-grad-reduce")
    if any(words in flags for words in buckets):
        flags = with_bucket(flags, BUCKET, folder)
    return flags


def with_bucket(flags: str, elements: int, folder: str) -> str:
    """Write a ds_config with this reduce_bucket_size to `folder`; return the flags with it."""
    path = Path(folder) / "ds_config.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": "auto", "reduce_bucket_size": elements}}))
    return f"{flags} --deepspeed-config {path}"


def measure(flags: str, steps: int = 3) -> int:
    """Run `steps` training steps; return the peak of live bytes of tensors on this rank."""
    import _meter

    meter = _meter.install()
    import _engine

    step = _engine.ours(flags).step
    for _ in range(steps):
        step()
    return int(meter.peak_bytes())


def predict(ranks: int, flags: str) -> Any:
    """Return the planner's `Memory` of the stage that needs the most memory."""
    from megatron.config.command_line import parse
    from megatron.config.ds_config import resolve
    from megatron.estimate.per_rank import rank_memory
    from megatron.estimate.sizes import stages_of

    config = parse(flags.split())
    found = rank_memory(config, resolve(config, ranks, False), ranks, False, stages_of(config))
    return max(found, key=lambda m: m.total)


def compare(case: str) -> dict[str, Any]:
    """Return the measured and the predicted bytes of one case."""
    ranks = CASES[case][0]
    with tempfile.TemporaryDirectory() as folder:
        flags = flags_of(case, folder)
        return {"ranks": ranks, "measured": highest(ranks, flags, folder), "predicted": predict(ranks, flags)}


def highest(ranks: int, flags: str, folder: str) -> int:
    """Start a run; return the highest peak of its ranks in bytes. folder: for their results."""
    launch = [sys.executable, str(ROOT / "tools" / "launch.py"), "--standalone", "--nproc-per-node", str(ranks)]
    launch += [__file__, f"--measure={flags}", f"--into={folder}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(launch, check=False, env=environment, capture_output=True, text=True, timeout=600)
    peaks = [int(path.read_text()) for path in Path(folder).glob("*.peak")]
    if done.returncode or len(peaks) < ranks:
        sys.exit(f"{flags}: {done.stderr[-2000:]}")
    return max(peaks)


def measure_rows(path: str) -> None:
    """Print the rows [ranks, megabytes, reduce_bucket_size or null, flags] of a file, with megabytes measured now."""
    for ranks, _, bucket, flags in json.loads(Path(path).read_text(encoding="utf-8")):
        with tempfile.TemporaryDirectory() as folder:
            given = flags if bucket is None else with_bucket(flags, bucket, folder)
            megabytes = round(highest(ranks, given, folder) / 1e6, 2)
        print(f"  {json.dumps([ranks, megabytes, bucket, flags])},", flush=True)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--into", help=argparse.SUPPRESS)
    parser.add_argument("--rows", help="file of random settings to measure instead of the cases")
    args = parser.parse_args()
    if args.rows:
        measure_rows(args.rows)
        return
    if args.measure:
        most = measure(args.measure)
        (Path(args.into) / f"{os.environ['RANK']}.peak").write_text(str(most))
        leave()
    kinds = ("weights", "gradients", "optimizer", "activations", "logits", "communication", "working")
    print(
        f"| case | ranks | measured MB | predicted MB | error | {' | '.join(kinds)} |\n|{' --- |' * (5 + len(kinds))}"
    )
    errors = []
    for case in args.only:
        found = compare(case)
        memory = found["predicted"]
        errors.append(memory.total / found["measured"] - 1)
        cells = [f"{size / 1e6:.1f}" for size in (found["measured"], memory.total)]
        cells += [f"{errors[-1]:+.1%}", *(f"{getattr(memory, kind) / 1e6:.1f}" for kind in kinds)]
        print(f"| {case} | {found['ranks']} | {' | '.join(cells)} |", flush=True)
    sizes = [abs(error) for error in errors]
    print(f"{len(sizes)} cases, largest error {max(sizes):.1%}, median {statistics.median(sizes):.1%}")


if __name__ == "__main__":
    main()
