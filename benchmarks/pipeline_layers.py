"""Pipeline engines on real layers: tokens per second, CPU-seconds per token, bytes sent.

    python benchmarks/pipeline_layers.py --stages 2
    python benchmarks/pipeline_layers.py --stages 2 --two-gradients

The same GPT-2 layers (embedding, blocks of causal attention and MLP, output layer) run under this project's engine
("ours"), stock DeepSpeed and torch.distributed.pipelining, in turn within every round on the same processes. With
--two-gradients layers pass on two tensors, as in an encoder-decoder: two tensors with gradients cross every stage
boundary, and each block reads both.
"""

import argparse
from typing import Any

from _alternate import Step, alternate, leave, new_parser, on_ranks, spread


def build_parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    sizes = (("stages", 2), ("micros", 8), ("layers", 8), ("hidden", 256), ("heads", 4), ("seq", 128), ("batch", 2),
             ("vocab", 2048), ("rounds", 7))  # fmt: skip
    for name, default in sizes:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--two-gradients", action="store_true")
    return parser


def build_layers(args: argparse.Namespace) -> list[Any]:
    """Return all layers of the model, initialised with a fixed seed."""
    import torch
    from torch import Tensor, nn

    h, heads = args.hidden, args.heads

    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(args.vocab, h), nn.Embedding(args.seq, h)

        def forward(self, tokens: Tensor) -> Any:
            hidden = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
            return (hidden, hidden * 0.5) if args.two_gradients else hidden

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
            self.qkv, self.dense = nn.Linear(h, 3 * h), nn.Linear(h, h)
            self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)
            self.mix = nn.Linear(h, h) if args.two_gradients else None

        def forward(self, inputs: Any) -> Any:
            hidden, other = inputs if self.mix else (inputs, None)
            b, s, _ = hidden.shape
            q, k, v = self.qkv(self.norm1(hidden)).view(b, s, heads, -1).transpose(1, 2).chunk(3, -1)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            hidden = hidden + self.dense(mixed.transpose(1, 2).reshape(b, s, h))
            if self.mix:
                hidden = hidden + other
            hidden = hidden + self.down(nn.functional.gelu(self.up(self.norm2(hidden))))
            return (hidden, torch.tanh(self.mix(hidden))) if self.mix else hidden

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out = nn.LayerNorm(h), nn.Linear(h, args.vocab, bias=False)

        def forward(self, inputs: Any) -> Tensor:
            return self.out(self.norm(inputs[0] if args.two_gradients else inputs))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    return [Embedding(), *(Block() for _ in range(args.layers)), Scores()]


def contenders(args: argparse.Namespace) -> tuple[dict[str, Step], Any]:
    """Return one function per contender that runs one training step, and this project's engine."""
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.distributed import pipelining

    import tds
    from tds._deepspeed import StockPipelineModule, deepspeed, patch_deepspeed, quietly

    patch_deepspeed()
    tds.init_distributed("gloo", auto_mpi_discovery=False)
    rank, last = dist.get_rank(), dist.get_rank() == args.stages - 1
    text = torch.randint(
        args.vocab, (2, args.micros * args.batch, args.seq), generator=torch.Generator().manual_seed(1)
    )
    micro = list(zip(*(each.split(args.batch) for each in text), strict=True))
    cuts = [0] + [1 + round(args.layers * (i + 1) / args.stages) for i in range(args.stages)]
    cuts[-1] = args.layers + 2

    def loss_fn(out: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out.flatten(0, 1), target.flatten())

    def engine(stock: bool, pipeline: dict[str, Any]) -> Any:
        with quietly():
            kind = StockPipelineModule if stock else tds.PipelineModule
            model = kind(build_layers(args), num_stages=args.stages, loss_fn=loss_fn, partition_method="type:Block")
            config = {"train_batch_size": args.micros * args.batch, "train_micro_batch_size_per_gpu": args.batch,
                      "pipeline": pipeline, "gradient_clipping": 0.0, "steps_per_print": 10**9}  # fmt: skip
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            return (deepspeed if stock else tds).initialize(model=model, optimizer=optimizer, config=config)[0]

    def steps_of(made: Any) -> Step:
        def step() -> None:
            with quietly():
                made.train_batch(iter(micro))

        return step

    module = nn.Sequential(*build_layers(args)[cuts[rank] : cuts[rank + 1]])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    stage = pipelining.PipelineStage(module, rank, args.stages, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(stage, args.micros, loss_fn=loss_fn)

    def torchs() -> None:
        optimizer.zero_grad()
        schedule.step(*([text[0]] if rank == 0 else []), **({"target": text[1], "losses": []} if last else {}))
        optimizer.step()

    ours = engine(False, {})
    steps = {
        "ours, 1f1b": steps_of(ours),
        "ours, 1f1b with extra_warmup 1": steps_of(engine(False, {"extra_warmup": 1})),
        "ours, zb-h1": steps_of(engine(False, {"schedule": "zb-h1"})),
        f"DeepSpeed {deepspeed.__version__} PipelineEngine": steps_of(engine(True, {})),
    }
    if not args.two_gradients:  # torch's stage is an nn.Sequential here, which can pass on only one tensor.
        steps[f"torch {torch.__version__} Schedule1F1B"] = torchs
    return steps, ours


def main() -> None:
    args = build_parser().parse_args()
    on_ranks(args.stages)
    import torch
    import torch.distributed as dist

    steps, ours = contenders(args)
    before = ours.bytes_sent
    steps["ours, 1f1b"]()
    sent = torch.tensor([ours.bytes_sent - before], dtype=torch.float64)
    dist.all_reduce(sent)
    found = alternate(steps, args.rounds)
    if dist.get_rank() == 0:
        tokens = args.micros * args.batch * args.seq
        streams = 2 if args.two_gradients else 1
        least = (args.stages - 1) * 2 * streams * args.micros * args.batch * args.seq * args.hidden * 4
        print(
            f"{args.stages} stages, {args.layers} layers, hidden {args.hidden}, "
            f"{args.micros} x {args.batch} x {args.seq} tokens"
        )
        print("| contender | tokens/s, median (lowest to highest) | ours / it, by round | CPU-ms per token |")
        print("| --- | --- | --- | --- |")
        mine = [took for took, _ in found["ours, 1f1b"]]
        for name, rounds in found.items():
            ratio = [took / own for (took, _), own in zip(rounds, mine, strict=True)]
            cpu = spread([1e3 * busy / tokens for _, busy in rounds], ".3f")
            print(
                f"| {name} | {spread([tokens / took for took, _ in rounds], ',.0f')} | {spread(ratio, '.2f')} | {cpu} |"
            )
        print(f"ours sends {sent.item():,.0f} bytes a step; activations and their gradients alone have {least:,} bytes")
    leave()


if __name__ == "__main__":
    main()
