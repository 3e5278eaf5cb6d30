"""Overhead of pipeline engines, measured with stages that only sleep, so that computation does not hide the overhead.

    python benchmarks/pipeline.py --stages 4 --megabytes 1
    python benchmarks/pipeline.py --stages 4 --megabytes 8 --jitter 0.5
    python benchmarks/pipeline.py --stages 4 --schedules all

Contenders are this project's engine ("ours"), stock DeepSpeed's PipelineEngine and the schedules of
torch.distributed.pipelining, in turn within every round on the same processes. The ideal time
of 1F1B is (micro-batches + stages - 1) x (forward + backward). The table shows by how many percent the measured time
of a step exceeds this ideal time. Two rows without an engine show what the machine itself adds: the passes of a stage
alone, and 1F1B with bare messages of gloo, whose receives are all posted before the first pass. The last column shows
the difference in percent between the ideal time of the contender's own schedule and that of 1F1B; it is negative for a
schedule with a smaller bubble.
"""

import argparse
import random
import time
from typing import Any

from _alternate import Step, alternate, leave, new_parser, on_ranks, spread

FORWARD, BACKWARD = 0.020, 0.040  # seconds; BACKWARD is half for input gradients and half for weight gradients


def build_parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micros", type=int, default=16)
    parser.add_argument("--megabytes", type=float, default=1.0, help="size in MB of the tensor that a stage sends")
    parser.add_argument(
        "--jitter",
        type=float,
        default=0.0,
        help="random variation of the time of a pass; 0.5 means 0.5 to 1.5 times the constant time (default: 0)",
    )
    parser.add_argument(
        "--schedules",
        choices=["1f1b", "all"],
        default="1f1b",
        help='schedules to measure; "all" adds interleaved and zb-h1 to 1f1b (default: 1f1b)',
    )
    parser.add_argument("--rounds", type=int, default=5)
    return parser


def stage_class(args: argparse.Namespace, rank: int) -> Any:
    """Return a module class that sleeps instead of computing the output, the input gradient and the weight gradient."""
    import torch
    from torch import Tensor, nn

    rng = random.Random(rank)

    def pause(seconds: float) -> None:
        time.sleep(seconds * (1 + args.jitter * rng.uniform(-1, 1)))

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:  # type: ignore[override]
            ctx.backward_seconds = backward
            pause(forward)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
            pause(ctx.backward_seconds)
            return grad, None, None

    class Stage(nn.Module):
        def __init__(self, share: float = 1.0) -> None:
            super().__init__()
            self.weight, self.share = nn.Parameter(torch.ones(1)), share

        def forward(self, x: Tensor) -> Tensor:
            half = BACKWARD / 2 * self.share
            weight = Sleep.apply(self.weight, 0.0, half)  # type: ignore[no-untyped-call]
            return Sleep.apply(x, FORWARD * self.share, half) + weight  # type: ignore[no-any-return,no-untyped-call]

    return Stage


def contenders(args: argparse.Namespace) -> dict[str, Step]:
    """Return one function per contender that runs one training step."""
    import torch
    import torch.distributed as dist
    from torch import Tensor
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    import tds
    from tds._deepspeed import StockPipelineModule, deepspeed, patch_deepspeed, quietly

    patch_deepspeed()
    tds.init_distributed("gloo", auto_mpi_discovery=False)
    rank = dist.get_rank()
    stage = stage_class(args, rank)
    width = int(args.megabytes * 1e6 / 4)
    x, y = torch.zeros(1, width), torch.zeros(1, 1)

    def loss_fn(out: Tensor, target: Tensor) -> Tensor:
        return (out[:, :1] - target).square().mean()

    def engine(module: Any, initialize: Any, pipeline: dict[str, Any], chunks: int = 1) -> Step:
        more = {"chunks": chunks} if chunks > 1 else {}
        with quietly():
            layers = [stage(1 / chunks) for _ in range(args.stages * chunks)]
            model = module(layers, num_stages=args.stages, loss_fn=loss_fn, partition_method="uniform", **more)
            config = {"train_batch_size": args.micros, "train_micro_batch_size_per_gpu": 1, "pipeline": pipeline,
                      "gradient_clipping": 0.0, "steps_per_print": 10**9}  # fmt: skip
            made, *_ = initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), config=config)

        def step() -> None:
            with quietly():
                made.train_batch(iter([(x, y)] * args.micros))

        return step

    whole_x, whole_y = torch.zeros(args.micros, width), torch.zeros(args.micros, 1)

    def torchs(kind: Any, chunks: int = 1, single: bool = False) -> Step:
        total = args.stages * chunks
        parts = [
            pipelining.PipelineStage(stage(1 / chunks), rank + args.stages * c, total, torch.device("cpu"))
            for c in range(chunks)
        ]
        schedule = kind(parts[0] if single else parts, args.micros, loss_fn=loss_fn)
        optimizer = torch.optim.SGD([p for part in parts for p in part.submod.parameters()], lr=0.0)

        def step() -> None:
            last = {"target": whole_y, "losses": []} if rank == args.stages - 1 else {}
            schedule.step(*([whole_x] if rank == 0 else []), **last)
            optimizer.step()
            optimizer.zero_grad()

        return step

    steps = {
        "no engine, passes alone": without_engine(args, sends=False),
        "no engine, bare messages": without_engine(args, sends=True),
        "ours, 1f1b": engine(tds.PipelineModule, tds.initialize, {}),
        "ours, 1f1b with extra_warmup 1": engine(tds.PipelineModule, tds.initialize, {"extra_warmup": 1}),
        f"DeepSpeed {deepspeed.__version__} PipelineEngine": engine(StockPipelineModule, deepspeed.initialize, {}),
        f"torch {torch.__version__} Schedule1F1B": torchs(schedules.Schedule1F1B, single=True),
    }
    if args.schedules == "all":
        steps |= {
            "ours, interleaved, 2 chunks": engine(tds.PipelineModule, tds.initialize, {"schedule": "interleaved"}, 2),
            "torch ScheduleInterleaved1F1B, 2 chunks": torchs(schedules.ScheduleInterleaved1F1B, 2),
            "ours, zb-h1": engine(tds.PipelineModule, tds.initialize, {"schedule": "zb-h1"}),
            "torch ScheduleInterleavedZeroBubble, 1 chunk": torchs(schedules.ScheduleInterleavedZeroBubble),
        }
    return steps


def without_engine(args: argparse.Namespace, sends: bool) -> Step:
    """Return a step of 1F1B in plain torch: only the passes of one stage, or with the messages between stages, too."""
    import torch
    import torch.distributed as dist
    from torch import Tensor

    rank = dist.get_rank() if sends else 0
    stages = args.stages if sends else 1
    passes = args.micros if sends else args.micros + args.stages - 1
    width = int(args.megabytes * 1e6 / 4)
    stage = stage_class(args, rank)()

    def step() -> None:
        inputs, grads = ([torch.zeros(1, width) for _ in range(passes)] for _ in range(2))
        arrivals = [dist.irecv(x, rank - 1, tag=i) for i, x in enumerate(inputs)] if rank else []
        returns = [dist.irecv(g, rank + 1, tag=passes + i) for i, g in enumerate(grads)] if rank < stages - 1 else []
        outputs: dict[int, tuple[Tensor, Tensor]] = {}
        sent = []

        def forward(micro: int) -> None:
            if arrivals:
                arrivals[micro].wait()
            x = inputs[micro].requires_grad_()
            outputs[micro] = x, stage(x)
            if returns:
                sent.append(dist.isend(outputs[micro][1].detach(), rank + 1, tag=micro))

        def backward(micro: int) -> None:
            if returns:
                returns[micro].wait()
            x, y = outputs.pop(micro)
            y.backward(grads[micro])  # type: ignore[no-untyped-call]
            if arrivals:
                sent.append(dist.isend(x.grad, rank - 1, tag=passes + micro))

        warmup = stages - 1 - rank
        for micro in range(passes + warmup):
            if micro < passes:
                forward(micro)
            if micro >= warmup:
                backward(micro - warmup)
        for message in sent:
            message.wait()

    return step


def ideals(args: argparse.Namespace) -> dict[str, float]:
    """Return {schedule: seconds that a step would take if communication took no time}."""
    from tds.schedule import find_schedule
    from tds.timetable import simulate_times

    found = {}
    for name, settings, chunks in (
        ("1f1b", {}, 1), ("interleaved", {"schedule": "interleaved"}, 2), ("zb-h1", {"schedule": "zb-h1"}, 1),
    ):  # fmt: skip
        schedule = find_schedule(settings, chunks)
        plan = [list(schedule(s, args.stages, args.micros)) for s in range(args.stages)]
        found[name] = max(span.end for span in simulate_times(plan, FORWARD, BACKWARD))
    return found


def main() -> None:
    args = build_parser().parse_args()
    on_ranks(args.stages)
    import torch.distributed as dist

    steps = contenders(args)
    found = alternate(steps, args.rounds)
    if dist.get_rank() == 0:
        ideal = ideals(args)
        print(f"{args.stages} stages, {args.micros} micro-batches, {args.megabytes:g} MB, jitter {args.jitter:g}")
        print(
            "| contender | step time above the ideal of 1f1b in %, median (lowest to highest) | "
            "own ideal time above that of 1f1b |\n| --- | --- | --- |"
        )
        for name, rounds in found.items():
            low = name.lower()
            own = ideal["zb-h1" if "zb" in low or "zero" in low else "interleaved" if "interleaved" in low else "1f1b"]
            over = spread([took / ideal["1f1b"] - 1 for took, _ in rounds], "+.1%")
            print(f"| {name} | {over} | {own / ideal['1f1b'] - 1:+.1%} |")
    leave()


if __name__ == "__main__":
    main()
