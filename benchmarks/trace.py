"""Overhead of --trace: steps of the same pipeline with and without a recorder, in turn, on two ranks.

    python benchmarks/trace.py --rounds 21

Prints two ratios of a step with a recorder to a step without: the ratio of wall-clock times and that of CPU times.
These ratios are noisy, so the last row is a finer estimate: the time to record one span, measured separately, times the
number of spans in a step.
"""

import statistics
import time
from pathlib import Path

from _alternate import alternate, leave, new_parser, on_ranks, spread

FLAGS = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --vocab-size 8064 --hidden-dropout 0 "
    "--attention-dropout 0 --batch-size 4 --gas 4 --precision fp32 --pipe-parallel-size 2"
)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    on_ranks(2)
    import _engine
    import torch
    import torch.distributed as dist

    from tds import trace

    step = _engine.ours(FLAGS).step
    tracer = trace.Tracer(torch.device("cpu"), Path("/dev/null"), {"rank": dist.get_rank()})

    def traced() -> None:
        trace.start(tracer)
        tracer.iteration(1)
        step()
        trace.stop()

    found = alternate({"without": step, "with": traced}, args.rounds)
    spans = len(tracer.spans()[-1][1])
    begin = time.perf_counter()
    trace.start(tracer)
    tracer.iteration(2)
    for _ in range(10_000):
        trace.end(trace.begin(), "nothing")
    trace.stop()
    each = (time.perf_counter() - begin) / 10_000
    if dist.get_rank() == 0:
        pairs = list(zip(found["with"], found["without"], strict=True))
        usual = statistics.median(took for took, _ in found["without"])
        print("| ratio, step with a recorder / step without | value |\n| --- | --- |")
        print(f"| seconds of a step, by round | {spread([a[0] / b[0] for a, b in pairs], '.3f')} |")
        print(f"| CPU-seconds of both ranks, by round | {spread([a[1] / b[1] for a, b in pairs], '.3f')} |")
        share = spans * each / usual
        print(f"| estimate: {spans} spans of {each * 1e6:.2f} us in a step of {usual * 1e3:.0f} ms | {1 + share:.4f} |")
    leave()


if __name__ == "__main__":
    main()
