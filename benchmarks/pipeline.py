"""What a pipeline engine itself costs: stages that only sleep, so that a small machine hides nothing.

    python benchmarks/pipeline.py --stages 4 --megabytes 1
    python benchmarks/pipeline.py --stages 4 --megabytes 8 --jitter 0.5

Contenders, in turn within every round, on the same processes: ours with 1F1B and with extra warm-up,
stock DeepSpeed's PipelineEngine, and Schedule1F1B of torch.distributed.pipelining. Shown is the
time of a step over the schedule's ideal, (micro-batches + stages - 1) x (forward + backward).
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
FORWARD, BACKWARD = 0.020, 0.040


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micros", type=int, default=16)
    parser.add_argument("--megabytes", type=float, default=1.0, help="size of the tensor between stages")
    parser.add_argument("--jitter", type=float, default=0.0, help="0.5 lets every pass take 0.5 to 1.5 times as long")
    parser.add_argument("--rounds", type=int, default=5)
    return parser


def contenders(args: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """One function per contender that runs one training step."""
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn

    import tds
    from tds._deepspeed import StockPipelineModule, deepspeed, prepare, quietly

    prepare()
    tds.init_distributed("gloo", auto_mpi_discovery=False)
    rank = dist.get_rank()
    rng = random.Random(rank)

    def pause(seconds: float) -> None:
        time.sleep(seconds * (1 + args.jitter * rng.uniform(-1, 1)))

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            pause(FORWARD)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            pause(BACKWARD)
            return grad

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return Sleep.apply(x + self.weight)  # type: ignore[no-any-return,no-untyped-call]

    width = int(args.megabytes * 1e6 / 4)
    x, y = torch.zeros(1, width), torch.zeros(1, 1)

    def loss_fn(out: Tensor, target: Tensor) -> Tensor:
        return (out[:, :1] - target).square().mean()

    def engine(module: Any, initialize: Any, pipeline: dict[str, Any]) -> Callable[[], None]:
        with quietly():
            model = module([Stage() for _ in range(args.stages)], num_stages=args.stages, loss_fn=loss_fn,
                           partition_method="uniform")  # fmt: skip
            config = {"train_batch_size": args.micros, "train_micro_batch_size_per_gpu": 1, "pipeline": pipeline,
                      "gradient_clipping": 0.0, "steps_per_print": 10**9}  # fmt: skip
            made, *_ = initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), config=config)

        def step() -> None:
            with quietly():
                made.train_batch(iter([(x, y)] * args.micros))

        return step

    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    module = Stage()
    stage = PipelineStage(module, rank, args.stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, args.micros, loss_fn=loss_fn)
    whole_x, whole_y = torch.zeros(args.micros, width), torch.zeros(args.micros, 1)

    def torchs() -> None:
        if rank == 0:
            schedule.step(whole_x)
        elif rank == args.stages - 1:
            schedule.step(target=whole_y, losses=[])
        else:
            schedule.step()

    return {
        "ours, 1f1b": engine(tds.PipelineModule, tds.initialize, {}),
        "ours, 1f1b with extra_warmup 1": engine(tds.PipelineModule, tds.initialize, {"extra_warmup": 1}),
        f"DeepSpeed {deepspeed.__version__} PipelineEngine": engine(StockPipelineModule, deepspeed.initialize, {}),
        f"torch {torch.__version__} Schedule1F1B": torchs,
    }


def main() -> None:
    args = build_parser().parse_args()
    if "RANK" not in os.environ:
        launch = [
            sys.executable,
            str(ROOT / "tools" / "launch.py"),
            "--standalone",
            "--nproc-per-node",
            str(args.stages),
        ]
        sys.exit(subprocess.run([*launch, __file__, *sys.argv[1:]], check=False).returncode)
    import torch.distributed as dist

    steps = contenders(args)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(args.rounds + 1):
        for name, step in steps.items():
            dist.barrier()
            begin = time.perf_counter()
            step()
            dist.barrier()
            if round_:  # the first warms up
                seconds[name].append(time.perf_counter() - begin)
    if dist.get_rank() == 0:
        ideal = (args.micros + args.stages - 1) * (FORWARD + BACKWARD)
        print(f"{args.stages} stages, {args.micros} micro-batches, {args.megabytes:g} MB, jitter {args.jitter:g}")
        print("| contender | over the ideal, median | lowest to highest |\n| --- | --- | --- |")
        for name, found in seconds.items():
            over = sorted(f / ideal - 1 for f in found)
            print(f"| {name} | {statistics.median(over):+.1%} | {over[0]:+.1%} to {over[-1]:+.1%} |")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
