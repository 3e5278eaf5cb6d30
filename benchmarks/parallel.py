"""Speed of two ranks, compared with DDP and DeepSpeed (data parallel), DTensor (tensor parallel) or torch (pipeline).

    python benchmarks/parallel.py --kind dp --rounds 7
    python benchmarks/parallel.py --kind tp --rounds 7
    python benchmarks/parallel.py --kind pp --rounds 7
    python benchmarks/parallel.py --kind pp-dp --rounds 7
    python benchmarks/parallel.py --kind ep --rounds 7
    python benchmarks/parallel.py --kind cp --rounds 7 --seq 4096 --batch 1 --layers 2

All contenders run on the same two gloo processes, one thread each, and make their steps in turn. For pp-dp there are
four processes: two replicas of two stages. "ours" is this project. "alone" is this project's model on each rank
without communication, the ideal for dp and ep. For tp, cp and pp, where both ranks share one batch, the ideal is half
the time of "alone". For ep the model has experts. For ep and cp no other library is measured; for cp the script also
prints the bytes of activations that a rank keeps for the backward pass. With pp a step has 8 micro-batches of one
sample, and torch's schedule does not clip gradients. benchmarks/pipeline_layers.py runs identical layers in every
pipeline engine.
"""

import argparse
from collections.abc import Callable
from typing import Any

import _engine
from _alternate import Step, alternate, leave, new_parser, on_ranks, spread

MICROS = 8  # micro-batches per step of a pipeline
EXPERTS = "--num-experts 8 --expert-ff-hidden-size 1024"  # of the model for ep
PIPELINE = f"--pipe-parallel-size 2 --partition-method type:Block --gas {MICROS} --no-tie-embeddings"


def _flags(args: argparse.Namespace, more: str) -> str:
    return (
        f"--num-layers {args.layers} --hidden-size {args.hidden} --num-attention-heads 8 --seq-length {args.seq} "
        f"--vocab-size {args.vocab} --hidden-dropout 0 --attention-dropout 0 --batch-size {args.batch} "
        f"--precision {args.precision} {EXPERTS if args.kind == 'ep' else ''} {more}"
    )


def _count(text: Any) -> Callable[[Any], Any]:
    import torch

    count = torch.tensor(float(text[:, 1:].numel()))
    return lambda batch: count


def _loop(model: Any, loss_of: Callable[[], Any]) -> Step:
    import torch
    from torch.distributed.tensor import DTensor

    # torch cannot clip or step DTensors and plain tensors together.
    kinds = [[p for p in model.parameters() if isinstance(p, DTensor) == split] for split in (True, False)]
    groups = [group for group in kinds if group]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-4, fused=True)

    def step() -> None:
        loss_of().backward()
        for group in groups:
            torch.nn.utils.clip_grad_norm_(group, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def ours(args: argparse.Namespace, more: str) -> Step:
    """Return a function that runs one step of this project's engine.

    The function first restores the mesh with which the engine was built, since building another contender changes the
    current mesh.
    """
    from megatron.mpu import current

    step = _engine.ours(_flags(args, more)).step
    here = current.parallel_context()

    def step_in_mesh() -> None:
        current.set_context(here)
        step()

    return step_in_mesh


def alone(args: argparse.Namespace, text: Any) -> Step:
    from megatron.config.command_line import parse
    from megatron.model import GPT2Model
    from megatron.mpu import current

    before = current.parallel_context()
    single = current.ParallelContext(options=before.options)

    def in_own_mesh(call: Callable[[], Any]) -> Any:
        current.set_context(single)
        found = call()
        current.set_context(before)
        return found

    model = in_own_mesh(lambda: GPT2Model(parse(_flags(args, "").split())))
    return _loop(model, lambda: in_own_mesh(lambda: model(text[:, :-1], labels=text[:, 1:]).mean()))


def ddp(args: argparse.Namespace, text: Any) -> Step:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(_nano(args), gradient_as_bucket_view=True)
    return _loop(model, lambda: model(text))


def deepspeed(args: argparse.Namespace, text: Any) -> Step:
    import deepspeed
    import torch

    model = _nano(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    config = {"train_micro_batch_size_per_gpu": args.batch, "gradient_clipping": 1.0, "steps_per_print": 10**9}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step() -> None:
        engine.backward(engine(text))
        engine.step()

    return step


def dtensor(args: argparse.Namespace, text: Any) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = _nano(args, split_qkv=True)
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = {"q": columns, "k": columns, "v": columns, "out": rows, "up": columns, "down": rows}
    for layer in model.layers:
        layer.heads //= 2
        parallelize_module(layer, init_device_mesh("cpu", (2,)), plan)
    return _loop(model, lambda: model(text))


def _token_loss(out: Any, target: Any) -> Any:
    from torch.nn import functional

    return functional.cross_entropy(out.flatten(0, 1), target.flatten())


def pipelines(args: argparse.Namespace, text: Any) -> dict[str, Step]:
    """Return the training steps of torch's and DeepSpeed's pipeline engines on `_nano`'s layers in two equal stages."""
    import torch
    import torch.distributed as dist
    from _nano import nano_layers
    from torch import nn
    from torch.distributed import pipelining

    rank = dist.get_rank()
    layers = nano_layers(args.vocab, args.seq, args.hidden, args.layers, 8)
    half = 1 + args.layers // 2
    module = nn.Sequential(*(layers[half:] if rank else layers[:half]))
    stage = pipelining.PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(stage, MICROS, loss_fn=_token_loss)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    inputs, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def torchs() -> None:
        schedule.step(*(() if rank else (inputs,)), **({"target": labels, "losses": []} if rank else {}))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return {"torch Schedule1F1B": torchs, **deepspeed_pipeline(args, text)}


def deepspeed_pipeline(args: argparse.Namespace, text: Any) -> dict[str, Step]:
    """Return the step of DeepSpeed's pipeline engine on `_nano`'s layers, with two stages in each replica."""
    import deepspeed
    import torch
    import torch.distributed as dist
    from _nano import nano_layers

    from tds._deepspeed import StockPipelineModule, quietly

    replicas = dist.get_world_size() // 2
    inputs, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    with quietly():
        again = nano_layers(args.vocab, args.seq, args.hidden, args.layers, 8)
        model = StockPipelineModule(again, num_stages=2, loss_fn=_token_loss, partition_method="type:_Layer")
        config = {"train_batch_size": MICROS * replicas, "train_micro_batch_size_per_gpu": 1}
        config |= {"gradient_clipping": 1.0, "steps_per_print": 10**9}
        adam = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=config)
    micros = list(zip(inputs.split(1), labels.split(1), strict=True))

    def stock() -> None:
        with quietly():
            engine.train_batch(iter(micros))

    return {"DeepSpeed PipelineEngine": stock}


def peers(args: argparse.Namespace, text: Any) -> dict[str, Step]:
    if args.kind in ("cp", "ep"):
        return {}
    if args.kind == "dp":
        return {"torch DDP": ddp(args, text), "DeepSpeed": deepspeed(args, text)}
    if args.kind == "tp":
        return {"torch DTensor": dtensor(args, text)}
    return pipelines(args, text) if args.kind == "pp" else deepspeed_pipeline(args, text)


def _nano(args: argparse.Namespace, split_qkv: bool = False) -> Any:
    from _nano import Nano

    return Nano(args.vocab, args.seq, args.hidden, args.layers, 8, split_qkv)


def _kept(step: Step) -> int:
    """Run a first step; return the bytes of activations that this rank keeps for the backward pass."""
    import torch
    from torch import nn

    seen: dict[int, int] = {}
    alive = []  # These references keep the storages alive, so that no other storage reuses an address.

    def pack(x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, nn.Parameter) and not isinstance(x._base, nn.Parameter):
            alive.append(x.detach())
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        step()
    return sum(seen.values())


def _repeated(step: Step, times: int) -> Step:
    """Return a function that makes `times` steps, so that the barrier after a turn weighs less."""

    def steps() -> None:
        for _ in range(times):
            step()

    return steps


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--kind", choices=("dp", "tp", "cp", "ep", "pp", "pp-dp"), default="dp")
    for name, default in (("layers", 6), ("hidden", 512), ("seq", 256), ("vocab", 16000), ("batch", 4), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=1, help="steps of a contender in each round")
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16"),
        default="fp32",
        help='precision of "ours"; the other contenders use fp32 (default: fp32)',
    )
    parser.add_argument(
        "--flags",
        action="append",
        default=[],
        help='also run "ours" with these flags, e.g. --flags=--sequence-parallel',
    )
    parser.add_argument("--ours-only", action="store_true", help='run only the contenders "ours" and "alone"')
    args = parser.parse_args()
    on_ranks(4 if args.kind == "pp-dp" else 2)

    import torch
    import torch.distributed as dist

    from megatron.ranks import device as device_module

    dice = torch.Generator().manual_seed(1)
    layouts = {
        "dp": "",
        "ep": "--expert-parallel-size 2",
        "tp": "--model-parallel-size 2",
        "cp": "--context-parallel-size 2",
    }
    layout = layouts.get(args.kind, PIPELINE)
    pipeline = args.kind.startswith("pp")
    if pipeline:
        args.batch = 1
    found_ours = {"ours": ours(args, layout)}
    for flags in [*args.flags, *(["--expert-parallel-size 1"] if args.kind == "ep" else [])]:
        found_ours[f"ours, {flags}"] = ours(args, f"{layout} {flags}")
    samples = MICROS if pipeline else args.batch
    text = torch.randint(args.vocab, (samples, args.seq + 1), generator=dice)
    torch.manual_seed(0)  # all ranks draw the same initial weights
    steps = {**found_ours, "alone": alone(args, text), **({} if args.ours_only else peers(args, text))}
    kept = {name: _kept(step) for name, step in steps.items()} if args.kind == "cp" else {}
    # "ours" lets the allocator keep freed memory after its first step; do the same for the other contenders.
    device_module.keep_freed_memory(torch.device("cpu"))
    found = alternate({name: _repeated(step, args.steps) for name, step in steps.items()}, args.rounds)
    if dist.get_rank() == 0:
        tokens = args.steps * samples * args.seq * (2 if args.kind in ("dp", "pp-dp", "ep") else 1)
        halves = 1.0 if args.kind in ("dp", "ep") else 0.5
        print("| contender | tokens/s, median (lowest to highest) | ours / it, by round | share of the ideal |")
        print("| --- | --- | --- | --- |")
        for name, rounds in found.items():
            ratios = [it[0] / mine[0] for it, mine in zip(rounds, found["ours"], strict=True)]
            shares = [halves * best[0] / it[0] for it, best in zip(rounds, found["alone"], strict=True)]
            speeds = [tokens / seconds for seconds, _ in rounds]
            share = "" if name == "alone" or args.precision == "bf16" else spread(shares, ".2f")
            print(f"| {name} | {spread(speeds, ',.0f')} | {spread(ratios, '.2f')} | {share} |")
        if args.kind == "cp":
            print(
                "activations kept for the backward pass:",
                ", ".join(f"{name} {size / 1e6:,.0f} MB" for name, size in kept.items()),
            )
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
