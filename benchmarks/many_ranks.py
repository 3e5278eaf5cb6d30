"""Start-up cost of a large run for one rank, before the first step: process groups, seconds and memory.

    python benchmarks/many_ranks.py --ranks 1024 8192
    python benchmarks/many_ranks.py --ranks 1024 --rank 517 --stages 16 --model 8

No other rank is needed: the process is one rank of a simulated world (torch's fake process group) and sends no message.
The process does everything that a rank does until its engine is built, except for the watchdog and the comparison of
settings. The column "calls for all groups of an axis" counts the calls that create all groups of an axis together, as
NCCL's split does. The column "calls for one group" counts the calls that create a single group; in a real run, every
rank of the world would take part in each of these calls.
"""

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

from _alternate import ROOT, new_parser


def build_parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024], help="world sizes (default: 1024)")
    parser.add_argument("--rank", type=int, default=0, help="rank to measure (default: 0)")
    parser.add_argument("--stages", type=int, default=16)
    parser.add_argument("--model", type=int, default=8, help="model-parallel size (default: 8)")
    parser.add_argument("--context", type=int, default=1, help="context-parallel size (default: 1)")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument(
        "--json", action="store_true", help="print JSON instead of a table, for the first of --ranks only"
    )
    return parser


def measure(ranks: int, rank: int, stages: int, model: int, context: int, layers: int) -> dict[str, Any]:
    """Measure the start-up cost of one rank in this process; a process can do this only once."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import tds
    import tds.engine
    from megatron import mpu
    from megatron.config.command_line import parse
    from megatron.model import GPT2ModelPipe

    calls = {"at once": 0, "one by one": 0}
    honest = dist.new_group

    def new_group(*args: Any, **kwargs: Any) -> Any:
        calls["one by one"] += 1
        kwargs.pop("backend", None)  # A gloo group needs its other ranks.
        return honest(*args, **kwargs)

    def split_group(split_ranks: list[list[int]], **_: Any) -> Any:
        """Emulate NCCL's split, which creates only this rank's group."""
        calls["at once"] += 1
        mine = next((line for line in split_ranks if rank in line), None)
        return honest(mine) if mine else None

    os.environ |= {"LOCAL_RANK": "0", "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    tds.init_distributed("fake")
    dist.new_group = new_group
    tds.engine.Watchdog = lambda *_, **__: None  # The watchdog needs a store that all ranks share.
    with contextlib.suppress(ImportError):  # Older checkouts lack these modules and create groups one by one.
        from tds import groups, neighbours

        dist.split_group, groups.can_split_world = split_group, lambda: True
        groups.urgent_options = lambda world, device: None
        neighbours.has_message_queues = lambda _: True  # Create separate groups for each stage boundary, as under NCCL.
    config = parse(
        f"--num-layers {layers} --hidden-size 64 --num-attention-heads 8 --seq-length 16 --vocab-size 1000 "
        f"--pipe-parallel-size {stages} --model-parallel-size {model} --context-parallel-size {context} --batch-size 1 "
        f"--gas {stages} --precision fp32".split()
    )
    seconds = {}
    begin = time.perf_counter()
    mpu.initialize_model_parallel(model, stages, 1, context_parallel_size=context)
    seconds["grid"] = time.perf_counter() - begin
    begin = time.perf_counter()
    pipe = GPT2ModelPipe(config)
    seconds["model"] = time.perf_counter() - begin
    begin = time.perf_counter()
    settings = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": stages, "steps_per_print": 10**9}
    settings["train_batch_size"] = stages * ranks // stages // model
    tds.initialize(model=pipe, optimizer=torch.optim.SGD(pipe.parameters(), 0.1), config=settings)
    seconds["engine"] = time.perf_counter() - begin
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "ranks": ranks, **calls, **{name: round(value, 2) for name, value in seconds.items()},
        "megabytes": round(held / 1024), "stage": pipe.stage_id, "layers": len(pipe.forward_funcs),
        "parameters": sum(p.numel() for p in pipe.parameters()),
    }  # fmt: skip


def main() -> None:
    args = build_parser().parse_args()
    sizes = args.rank, args.stages, args.model, args.context, args.layers
    if args.json:
        print(json.dumps(measure(args.ranks[0], *sizes)), flush=True)
        os._exit(0)
    print(
        "| ranks | calls for all groups of an axis | calls for one group | building the grid | building the model | "
        f"building the engine | increase of peak memory | this rank's stage |\n|{' --- |' * 8}"
    )
    for ranks in args.ranks:
        argv = [sys.executable, __file__, "--json", "--ranks", str(ranks)]
        for name, value in zip(("--rank", "--stages", "--model", "--context", "--layers"), sizes, strict=True):
            argv += [name, str(value)]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        f = json.loads(done.stdout.splitlines()[-1])
        print(
            f"| {f['ranks']:,} | {f['at once']} | {f['one by one']} | {f['grid']} s | {f['model']} s | "
            f"{f['engine']} s | {f['megabytes']} MB | {f['stage']}: {f['layers']} layers, "
            f"{f['parameters']:,} parameters |",
            flush=True,
        )


if __name__ == "__main__":
    main()
