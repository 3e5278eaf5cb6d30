"""Profile of a training step by kind of operator, for this project and the implementations it is compared with.

    python benchmarks/where.py --precision bf16
    python benchmarks/where.py --model llama --ff 2048 --precision bf16

Contenders and flags are those of run.py, except --rounds. torch's profiler records `--steps` steps of each contender,
one contender after the other. All contenders use the same library for matmuls, so the time of these matmuls is a lower
bound for each of them.
"""

import argparse
import multiprocessing
import re
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import run
from _alternate import spread

# The first pattern that matches an operator gives its kind; operators without a match get the kind "the rest".
KINDS = {
    "matmuls": r"mm|linear|matmul|bmm|convolution|mkldnn",
    "attention": r"attention",
    "optimizer, norm and clipping": r"adam|_foreach|linalg|norm_except|clip",
    "loss": r"log_softmax|nll_loss|cross_entropy|logsumexp|exp",
    "layer norms": r"layer_norm|rms_norm",
    "activation": r"gelu|silu|sigmoid|tanh",
    "copies and conversions": r"copy_|_to_copy|clone|contiguous|stack|cat$|index|fill_|zero_",
}


def kind_of(operator: str) -> str:
    return next(
        (kind for kind, pattern in KINDS.items() if re.search(pattern, operator.removeprefix("aten::").lower())),
        "the rest",
    )


def seconds_by_kind(name: str, args: argparse.Namespace) -> list[Counter[str]]:
    """Return, for each step of a contender, the self time of operators in seconds, by kind of operator."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.set_num_threads(args.threads)
    step = run.contenders(args)[name](args)
    step()
    step()
    found = []
    for _ in range(args.steps):
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            step()
        found.append(Counter[str]())
        for event in seen.key_averages():
            found[-1][kind_of(event.key)] += event.self_cpu_time_total / 1e6
    return found


def main() -> None:
    args = run.arguments(__doc__)
    # Each contender needs its own process, since "ours" changes how the allocator keeps memory.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        found = {name: pool.submit(seconds_by_kind, name, args).result() for name in run.contenders(args)}
    print(f"| ms of a step, median (lowest to highest) |{'|'.join(f' {name} ' for name in found)}|")
    print(f"|{' --- |' * (len(found) + 1)}")
    for kind in (*KINDS, "the rest"):
        cells = (spread([1e3 * step[kind] for step in steps], ",.0f") for steps in found.values())
        print(f"| {kind} | {' | '.join(cells)} |")
    print(f"| all | {' | '.join(spread([1e3 * s.total() for s in steps], ',.0f') for steps in found.values())} |")


if __name__ == "__main__":
    main()
