"""Training speed and peak memory of one process, compared with other implementations on the same work.

    python benchmarks/run.py --precision fp32 --rounds 5
    python benchmarks/run.py --precision bf16 --model t5
    python benchmarks/run.py --only none --flags="--reference-ops cross-entropy" --flags=--no-keep-freed-memory

Every contender is a separate process. In every round the contenders make their steps in turn while the others wait, so
that background load affects all of them alike. "ours" is the engine that `pretrain()` drives: DeepSpeed's engine with
its gradient clipping and fused AdamW. It is compared with Hugging Face's model and a GPT-2 in the style of nanoGPT,
eager and compiled, in a simple training loop with the same clipping and AdamW. bf16 means bf16 weights with fp32 master
weights for "ours", and autocast with fp32 weights for the others.
"""

import argparse
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import _engine
from _alternate import new_parser, spread

Step = Callable[[], None]


def _flags(args: argparse.Namespace) -> str:
    common = (
        f"--num-layers {args.layers} --hidden-size {args.hidden} --num-attention-heads {args.heads} "
        f"--vocab-size {args.vocab} --batch-size {args.batch} --precision {args.precision} --hidden-dropout 0 "
        "--attention-dropout 0"
    )
    if args.model == "gpt2":
        return f"{common} --seq-length {args.seq}"
    if args.model in ("llama", "mixtral"):
        experts = f"--num-experts {args.experts} --experts-per-token {args.experts_per_token}"
        return (
            f"{common} --family llama --seq-length {args.seq} --num-key-value-heads {args.groups} "
            f"--ff-hidden-size {args.ff} --position-embedding rope --normalization rmsnorm --activation swiglu "
            f"--no-hidden-bias {experts if args.model == 'mixtral' else ''}"
        )
    return (
        f"{common} --family t5 --enc-seq-length {args.seq} --dec-seq-length {args.dec_seq} --kv-hidden-size 64 "
        f"--ff-hidden-size {args.ff} --normalization rmsnorm --position-embedding relative --no-scale-attention "
        "--no-hidden-bias --activation gated-gelu --no-tie-embeddings"
    )


def _tokens(args: argparse.Namespace) -> tuple[Any, Any]:
    import torch

    dice = torch.Generator().manual_seed(1)
    length = args.seq if args.model == "t5" else args.seq + 1
    return (
        torch.randint(args.vocab, (args.batch, length), generator=dice),
        torch.randint(args.vocab, (args.batch, args.dec_seq + 1), generator=dice),
    )


def ours(args: argparse.Namespace, more: str = "") -> Step:
    return _engine.ours(f"{_flags(args)} {more}").step


def _loop(args: argparse.Namespace, model: Any, loss_of: Callable[[], Any]) -> Step:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bf16"):
            loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def hugging_face(args: argparse.Namespace) -> Step:
    import _hugging_face

    text, wanted = _tokens(args)
    if args.model == "gpt2":
        gpt2 = _hugging_face.gpt2(args.vocab, args.seq, args.hidden, args.layers, args.heads)
        return _loop(args, gpt2, lambda: gpt2(text[:, :-1], labels=text[:, :-1]).loss)
    if args.model == "llama":
        sizes = args.hidden, args.ff, args.layers, args.heads, args.groups
        llama = _hugging_face.llama(args.vocab, args.seq, *sizes)
        return _loop(args, llama, lambda: llama(text[:, :-1], labels=text[:, :-1]).loss)
    if args.model == "mixtral":
        sizes = args.hidden, args.ff, args.layers, args.heads, args.groups
        mixtral = _hugging_face.mixtral(args.vocab, args.seq, *sizes, args.experts, args.experts_per_token)
        return _loop(args, mixtral, lambda: mixtral(text[:, :-1], labels=text[:, :-1]).loss)
    t5 = _hugging_face.t5(args.vocab, args.hidden, args.ff, args.layers, args.heads)
    return _loop(args, t5, lambda: t5(text, decoder_input_ids=wanted[:, :-1], labels=wanted[:, 1:].contiguous()).loss)


def nano(args: argparse.Namespace, compiled: bool = False) -> Step:
    import torch
    from _nano import Nano

    model = Nano(args.vocab, args.seq, args.hidden, args.layers, args.heads)
    text, _ = _tokens(args)
    call: Any = torch.compile(model) if compiled else model
    return _loop(args, model, lambda: call(text))


def contenders(args: argparse.Namespace) -> dict[str, Callable[[argparse.Namespace], Step]]:
    found: dict[str, Callable[[argparse.Namespace], Step]] = {"ours": ours}
    if not args.no_compile:
        found["ours, --compile"] = lambda args: ours(args, "--compile")
    for flags in args.flags:
        found[f"ours, {flags}"] = lambda args, flags=flags: ours(args, flags)  # type: ignore[misc]
    found["Hugging Face"] = hugging_face
    if args.model == "gpt2":
        found["nanoGPT-style"] = nano
        if not args.no_compile or "nanoGPT-style, compiled" in (args.only or []):
            found["nanoGPT-style, compiled"] = lambda args: nano(args, compiled=True)
    return {
        name: build for name, build in found.items() if not args.only or name.startswith("ours") or name in args.only
    }


def worker(name: str, args: argparse.Namespace, pipe: Connection) -> None:
    """Build a contender, then make `args.steps` training steps for each request that arrives on `pipe`.

    Sends back the seconds to the end of the first step, the seconds of the steps of each request and, at the end, the
    peak memory in MB.
    """
    import torch

    torch.set_num_threads(args.threads)
    begin = time.perf_counter()
    step = contenders(args)[name](args)
    step()
    first = time.perf_counter() - begin
    step()
    pipe.send(first)
    while pipe.recv():
        begin = time.perf_counter()
        for _ in range(args.steps):
            step()
        pipe.send(time.perf_counter() - begin)
    pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    pipe.close()
    sys.stdout.flush()
    os._exit(0)


def measure(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return each contender's seconds in each round, seconds to the end of its first step, and peak MB."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes = []
    found: dict[str, dict[str, Any]] = {}
    for name in contenders(args):
        mine, theirs = context.Pipe()
        processes.append(context.Process(target=worker, args=(name, args, theirs), daemon=False))
        processes[-1].start()
        theirs.close()
        try:
            found[name] = {"first": mine.recv(), "seconds": []}
            pipes[name] = mine
        except EOFError:
            print(f"{name}: could not be built, skipped", file=sys.stderr)
    try:
        for _ in range(args.rounds):
            for name, pipe in pipes.items():
                pipe.send(True)
                found[name]["seconds"].append(pipe.recv() / args.steps)
        for name, pipe in pipes.items():
            pipe.send(False)
            found[name]["peak_mb"] = pipe.recv()
    except (EOFError, OSError):
        for process in processes:
            process.kill()
        sys.exit(f"{name} has died. All contenders stay in memory: if it does not suffice, lower --batch")
    return found


def show(args: argparse.Namespace, found: dict[str, dict[str, Any]]) -> None:
    per_step = args.batch * (args.seq + args.dec_seq if args.model == "t5" else args.seq)
    bases = [name for name in ("ours", "ours, --compile") if name in found]
    head = ["contender", "tokens/s, median (lowest to highest)", *(f"{base} / it, by round" for base in bases)]
    head += ["peak MB", "peak, ours / its", "build + first step, s"]
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    for name, row in found.items():
        cells = [name, spread([per_step / s for s in row["seconds"]], ",.0f")]
        for base in bases:
            pairs = zip(row["seconds"], found[base]["seconds"], strict=True)
            cells.append(spread([it / mine for it, mine in pairs], ".2f"))
        cells += [f"{row['peak_mb']:,.0f}", f"{found['ours']['peak_mb'] / row['peak_mb']:.2f}", f"{row['first']:.1f}"]
        print(f"| {' | '.join(cells)} |")


def arguments(about: str | None) -> argparse.Namespace:
    """Parse the command line. Child processes get --threads threads, and huge pages as from `scripts/_run.sh`."""
    parser = new_parser(about)
    parser.add_argument("--model", choices=("gpt2", "llama", "mixtral", "t5"), default="gpt2")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    sizes = (
        ("layers", 12),
        ("hidden", 768),
        ("heads", 12),
        ("seq", 512),
        ("dec-seq", 114),
        ("ff", 1024),
        ("groups", 4),
        ("vocab", 21248),
        ("experts", 8),
        ("experts-per-token", 2),
    )
    for name, default in (*sizes, ("batch", 2), ("rounds", 5), ("steps", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--no-compile", action="store_true", help="skip the compiled contenders")
    parser.add_argument("--only", nargs="+", help='contenders to run besides "ours" (default: all)')
    parser.add_argument(
        "--flags",
        action="append",
        default=[],
        help='also run "ours" with these flags, e.g. --flags=--checkpoint-attention',
    )
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    return args


def main() -> None:
    args = arguments(__doc__)
    found = measure(args)
    show(args, found)


if __name__ == "__main__":
    main()
