"""Training speed of one process against peers on the same work: ratios, measured alternately in one run.

    python benchmarks/run.py --rounds 5 --json out.json

Peers: Hugging Face's GPT2LMHeadModel in a plain loop, where `transformers` is installed. Same
sizes, same fused AdamW, same batch; each round runs every contender once, in turn, so that
what else the machine is doing hits them alike. The median and the spread of the rounds are shown.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.arguments import parse  # noqa: E402
from megatron.model import GPT2Model  # noqa: E402

Step = Callable[[Tensor], None]


def _loop(model: torch.nn.Module, loss_of: Callable[[Tensor], Tensor]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(text: Tensor) -> None:
        loss_of(text).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def ours(args: argparse.Namespace) -> Step:
    config = parse(
        f"--num-layers {args.layers} --hidden-size {args.hidden} --num-attention-heads {args.heads} --seq-length "
        f"{args.seq} --vocab-size {args.vocab} --hidden-dropout 0 --attention-dropout 0".split()
    )
    model = GPT2Model(config).train()
    return _loop(model, lambda text: model(text[:, :-1], labels=text[:, 1:]).mean())


def hugging_face(args: argparse.Namespace) -> Step:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=args.vocab, n_positions=args.seq, n_embd=args.hidden, n_layer=args.layers, n_head=args.heads,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    return _loop(model, lambda text: model(text[:, :-1], labels=text[:, :-1]).loss)


def measure(step: Step, text: Tensor, steps: int) -> float:
    """Tokens per second over `steps` steps."""
    begin = time.perf_counter()
    for _ in range(steps):
        step(text)
    return steps * text.shape[0] * (text.shape[1] - 1) / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = (("layers", 4), ("hidden", 256), ("heads", 4), ("seq", 256), ("vocab", 8064), ("batch", 4))
    for name, default in (*sizes, ("rounds", 5), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", help="write the numbers to this file, too")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    contenders = {"ours": ours(args)}
    try:
        contenders["Hugging Face"] = hugging_face(args)
    except ImportError:
        print("transformers is not installed: nothing to compare with", file=sys.stderr)
    text = torch.randint(args.vocab, (args.batch, args.seq + 1), generator=torch.Generator().manual_seed(0))
    for step in contenders.values():
        measure(step, text, 2)  # warm up
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(args.rounds):
        for name, step in contenders.items():
            speeds[name].append(measure(step, text, args.steps))
    print("| contender | tokens/s, median | lowest to highest | ours / it |\n| --- | --- | --- | --- |")
    mine = statistics.median(speeds["ours"])
    for name, found in speeds.items():
        median = statistics.median(found)
        print(f"| {name} | {median:,.0f} | {min(found):,.0f} to {max(found):,.0f} | {mine / median:.2f} |")
    if args.json:
        Path(args.json).write_text(
            json.dumps({"settings": vars(args), "torch": torch.__version__, "tokens_per_second": speeds})
        )


if __name__ == "__main__":
    main()
