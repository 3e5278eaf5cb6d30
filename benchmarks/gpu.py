"""Training on one accelerator in bf16, compared with Hugging Face and compiled plain torch: tokens/s, MFU, memory.

    python benchmarks/gpu.py --models gpt2_1.3B
    python benchmarks/gpu.py --models llama_1b llama_8b_4_layers     Llama 1B, and four layers of Llama 8B
    python benchmarks/gpu.py --models mixtral_8x7b_2_layers          two layers of Mixtral 8x7B
    python benchmarks/gpu.py --models gpt2_345M --batch 8 --rounds 7 --turns 2
    python benchmarks/gpu.py --dry-run          tiny models on any device, a CPU included: a smoke test

Needs torch, DeepSpeed and numpy. This project, with and without --compile, is compared with Hugging Face's model, if
transformers is installed, and for GPT-2 with a compiled model in the style of nanoGPT. Hugging Face's and the
nanoGPT-style model train with autocast, fused AdamW and the same gradient clipping; for experts there is also a run
with bf16 weights and moments, since autocast leaves Hugging Face's experts in fp32. MFU is 6 N + attention FLOPs per
token (`megatron.training.metrics.flops_per_token`) relative to the device's dense bf16 peak
(`megatron.ranks.device.PEAK_TFLOPS`). Contenders run one after another, each in its own process with all of the
device's memory; every second turn runs them in reverse order. Memory is the peak that torch allocated. Contenders that
run out of memory or exceed --minutes are reported and skipped.
"""

import argparse
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _engine
from _alternate import ROOT, new_parser, spread

# name -> (micro-batch size, flags)
MODELS = {
    "gpt2_345M": (16, "--seq-length 1024"),
    "gpt2_1.3B": (8, "--seq-length 1024"),
    "t5_base": (32, "--enc-seq-length 512 --dec-seq-length 114"),
    "t5_large": (16, "--enc-seq-length 512 --dec-seq-length 114"),
    "llama_1b": (2, "--seq-length 4096 --vocab-size 128256"),
    "llama_8b_4_layers": (2, "--seq-length 4096 --vocab-size 128256 --num-layers 4"),
    "mixtral_8x7b_2_layers": (2, "--seq-length 4096 --vocab-size 32000 --num-layers 2 --tie-embeddings"),
}
SMALLER = {"1024": "32", "4096": "32", "512": "32", "114": "16", "128256": "512", "32000": "512"}  # for --dry-run
TINY = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ff-hidden-size 128"


def flags_of(args: argparse.Namespace, model: str) -> str:
    batch, own = MODELS[model]
    file = f"{ROOT}/configs/models/{re.sub(r'_[0-9]+_layers$', '', model)}.json"
    common = (
        f"--config {file} --batch-size {2 if args.dry_run else args.batch or batch} "
        f"--vocab-size {512 if args.dry_run else 50304} --hidden-dropout 0 --attention-dropout 0 --precision bf16"
    )
    if args.dry_run:
        own = " ".join(SMALLER.get(word, word) for word in own.split()) + " " + TINY
        own += "" if model.startswith("gpt2") else " --kv-hidden-size 16"
        own += " --num-key-value-heads 2" if model.startswith(("llama", "mixtral")) else ""
    return f"{common} {own} {args.flags}"


def worker(args: argparse.Namespace) -> None:
    """Run one contender on one model and print one line of JSON."""
    from megatron.model.work import flops_per_token
    from megatron.ranks import device as device_module

    name, contender = args.worker
    compiled = " --compile" if contender == "ours, --compile" else " --no-compile"
    device, flags = device_module.current_device(), flags_of(args, name)
    if not contender.startswith("ours"):
        config, model, step = peer(flags, device, contender)
    else:
        config, _, model, step = _engine.ours(flags + compiled)
    for _ in range(3):
        step()
    device_module.synchronize(device)
    seconds = []
    for _ in range(args.rounds):
        begin = time.perf_counter()
        for _ in range(args.steps):
            step()
        device_module.synchronize(device)
        seconds.append((time.perf_counter() - begin) / args.steps)
    counted = sum(p.numel() for p in model.parameters())
    d = config.data
    shape = (d.enc_seq_length, d.dec_seq_length) if config.is_t5 else (d.seq_length, 0)
    tokens = config.train.batch_size * sum(shape)
    flops = flops_per_token(counted, config, *shape) * tokens
    print(
        json.dumps(
            {
                "parameters": counted,
                "tokens": tokens,
                "flops": flops,
                "seconds": seconds,
                "peak_mb": device_module.peak_memory_mb(device),
                "peak_tflops": device_module.peak_tflops(device),
                "profile": profile(step, device) if contender == "ours" else "",
            }
        )
    )


def peer(flags: str, device: Any, contender: str) -> tuple[Any, Any, Callable[[], None]]:
    import _hugging_face
    import torch
    from _nano import Nano

    from megatron.config.command_line import parse

    config = parse(flags.split())
    m, d, size = config.model, config.data, config.train.batch_size
    vocab = m.vocab_size or 0
    with device:
        text = torch.randint(vocab, (size, (d.enc_seq_length if config.is_t5 else d.seq_length + 1) or 0))
        wanted = torch.randint(vocab, (size, (d.dec_seq_length or 0) + 1))
        if not contender.startswith("Hugging Face"):
            model: Any = Nano(vocab, d.seq_length, m.hidden_size, m.num_layers, m.num_attention_heads)
        elif config.is_t5:
            model = _hugging_face.t5(vocab, m.hidden_size, m.ff_size, m.num_layers, m.num_attention_heads, m.head_size)
        elif m.family == "llama":
            sizes = m.hidden_size, m.ff_size, m.num_layers, m.num_attention_heads, m.key_value_heads
            if m.num_experts:
                model = _hugging_face.mixtral(vocab, d.seq_length, *sizes, m.num_experts, m.experts_per_token)
            else:
                model = _hugging_face.llama(vocab, d.seq_length, *sizes, tied=m.tie_embeddings)
        else:
            model = _hugging_face.gpt2(vocab, d.seq_length, m.hidden_size, m.num_layers, m.num_attention_heads)
    if contender.endswith("bf16 weights"):
        model.bfloat16()
    call: Any = torch.compile(model) if "compiled" in contender else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def loss_of() -> Any:
        if not contender.startswith("Hugging Face"):
            return call(text)
        if config.is_t5:
            return call(text, decoder_input_ids=wanted[:, :-1], labels=wanted[:, 1:].contiguous()).loss
        return call(text[:, :-1], labels=text[:, :-1]).loss

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return config, model, step


def profile(step: Callable[[], None], device: Any) -> str:
    """Return a table of the operations that take most of the time of three steps."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    on_device = device.type != "cpu"
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_device else [])
    with torch_profile(activities=kinds) as found:
        for _ in range(3):
            step()
    key = "self_device_time_total" if on_device else "self_cpu_time_total"
    return str(found.key_averages().table(sort_by=key, row_limit=15, max_name_column_width=60))


def contenders(model: str, no_compile: bool) -> list[str]:
    found = ["ours", "ours, --compile", "Hugging Face"]
    if model.startswith("gpt2"):
        found += ["plain torch, compiled"]
    if model.startswith("mixtral"):  # autocast leaves the experts' grouped matmuls in fp32
        found += ["Hugging Face, bf16 weights"]
    return [name for name in found if not (no_compile and "compile" in name)]


def measure(model: str, contender: str, seconds: float) -> dict[str, Any] | str:
    """Run a contender in a separate process; return its measurements, or the reason why there are none."""
    if seconds <= 0:
        return "no time left, see --minutes"
    if contender.startswith("Hugging Face") and importlib.util.find_spec("transformers") is None:
        return "skipped: transformers is not installed"
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--worker", model, contender]
    environment = {**os.environ, "LOCAL_RANK": "0"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds:.0f} s, see --minutes"
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"parameters"')]
    if done.returncode or not lines:
        return "failed: " + (done.stderr.strip().splitlines() or ["no output"])[-1][:200]
    return json.loads(lines[-1])  # type: ignore[no-any-return]


def in_turns(model: str, args: argparse.Namespace) -> dict[str, dict[str, Any] | str]:
    """Measure every contender in each turn; return {contender: measurements, or the reason why there are none}.

    The list `seconds` of a contender's measurements contains the step times of all turns.
    """
    end, names = time.monotonic() + 60 * args.minutes, contenders(model, args.no_compile)
    found: dict[str, dict[str, Any] | str] = {}
    for turn in range(args.turns):
        for name in names if turn % 2 == 0 else reversed(names):
            new, before = measure(model, name, end - time.monotonic()), found.get(name)
            if isinstance(new, dict) and isinstance(before, dict):
                new["seconds"] += before["seconds"]
            if isinstance(new, dict) or turn == 0:
                found[name] = new
    return found


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batch", type=int, help="samples per micro-batch (default: depends on the model)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="steps per round (default: 5)")
    parser.add_argument(
        "--turns",
        type=int,
        default=1,
        help="how often to run all contenders; every second turn runs them in reverse order (default: 1)",
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit per model in minutes (default: 8)")
    parser.add_argument("--flags", default="", help='further flags for "ours", e.g. --flags=--checkpoint-activations')
    parser.add_argument("--no-compile", action="store_true", help="skip the compiled contenders")
    parser.add_argument("--dry-run", action="store_true", help="smoke test: run tiny models on any device")
    parser.add_argument("--profile", help="write a table of the most expensive operations to this file")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    from megatron.ranks import device as device_module

    if not device_module.has_accelerator() and not args.dry_run:
        print("not measured: there is no accelerator; --dry-run runs tiny models on the CPU")
        return
    profiles, failed = [], False
    print("| model and contender | tokens/s, median (lowest to highest) | TFLOP/s | MFU | ours / it | peak MB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for model in args.models:
        first = None
        for contender, found in in_turns(model, args).items():
            if isinstance(found, str):
                failed |= found.startswith("failed")
                print(f"| {model}: {contender} | {found} | | | | |")
                continue
            median = statistics.median(found["seconds"])
            first = first or median
            tflops, peak = found["flops"] / median / 1e12, found["peak_tflops"]
            speeds = spread([found["tokens"] / s for s in found["seconds"]], ",.0f")
            mfu = f"{tflops / peak:.1%}" if peak else "peak unknown"
            print(
                f"| {model} ({found['parameters'] / 1e6:,.0f} M): {contender} | {speeds} | {tflops:.1f} | {mfu} | "
                f"{median / first:.2f} | {found['peak_mb']:,.0f} |",
                flush=True,
            )
            profiles.append(f"{model}\n{found['profile']}" if found["profile"] else "")
    if args.profile:
        Path(args.profile).write_text("\n".join(filter(None, profiles)), encoding="utf-8")
    sys.exit(failed)


if __name__ == "__main__":
    main()
