"""Bits per character of poems after minutes of training: nanoGPT's model and recipe, and scripts/run_poet.sh.

    TRAIN_ITERS=1 bash scripts/run_poet.sh                        # prepares the poems in runs/poet
    python benchmarks/poet.py --minutes 10 --lr 3e-3 --iterations 240 --seeds 1 2 3 --plot docs/images/poet.png
    python benchmarks/poet.py --minutes 0 --iterations 80 --seeds 1 2 3 --ablate

For each seed, nanoGPT's model trains for --minutes, and then ours for --iterations iterations, both with all cores.
nanoGPT is plain compiled torch in fp32: learned positions, layer norms, GELU, AdamW with betas 0.9 and 0.95, weight
decay 0.1, a warm-up of 100 steps, a cosine decay to a tenth of --lr, and random windows of the concatenated poems. Its
clock starts after the compilation. The clock of ours is that of its log. Both have the same tokens, and all poems for
validation are scored one by one, from the beginning of a poem to its end. --ablate trains ours again, each time without
one of its ingredients; --plain trains our GPT-2 and our Llama with AdamW. --peers trainer is a GPT-2 that Hugging
Face's Trainer trains for --minutes with nanoGPT's recipe; it needs accelerate.
"""

import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _alternate import ROOT, new_parser

LAYERS, HIDDEN, HEADS, LENGTH, BATCH = 4, 256, 4, 128, 32
WARMUP = 100
PER_POINT = 10  # steps of a point of a curve
# Variant of the recipe -> the flags that it needs
ABLATIONS = {
    "all": "",
    "AdamW, learning rate 3e-3, for Muon": "--optimizer adam --lr 3e-3",
    "no QK norm": "--no-qk-norm",
    "GELU for SwiGLU": "--activation gelu-tanh --ff-hidden-size 1024",
    "cosine for linear decay": "--lr-decay-style cosine",
}
REPLICAS = 2
LLAMA = f"pretrain_llama.py --config {ROOT}/configs/models/llama_poet.json"
GPT2 = f"pretrain_gpt2.py --num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS}"
GPT2 += f" --seq-length {LENGTH} --hidden-dropout 0 --attention-dropout 0 --zero-stage 1"
ADAM = "--optimizer adam --lr 3e-3 --lr-decay-style cosine --min-lr 3e-4 --warmup 0.1 --weight-decay 0.1"
# Ours with nanoGPT's recipe, for --plain -> the script with its flags
PLAIN = {
    "our GPT-2, AdamW": f"{GPT2} {ADAM}",
    "our Llama, AdamW": f"{LLAMA} --no-qk-norm {ADAM}",
}

Curve = list[tuple[float, float]]  # (minutes, mean training loss in nats per token since the last point)


def tokens_of(prefix: Path) -> Any:
    """Return all tokens of a corpus, of two bytes each."""
    return np.memmap(f"{prefix}.bin", dtype=np.uint16, mode="r")


def documents_of(tokens: Any, eod: int) -> list[list[int]]:
    """Return the poems of a corpus, each with the end of a poem before and after it."""
    ends = np.flatnonzero(tokens == eod)
    found = []
    begin = 0
    for end in ends:
        found.append([eod, *tokens[begin : end + 1].tolist()])
        begin = end + 1
    return found


def padded_vocab(tokens: Any) -> int:
    """Return the number of token ids, rounded up to a multiple of 64."""
    size = int(tokens.max()) + 1
    return math.ceil(size / 64) * 64


def hugging_face(folder: Path, lr: float, minutes: float, seed: int, eod: int, characters: int) -> dict[str, Any]:
    """Let Hugging Face's Trainer train its GPT-2; return its bits per character, steps, minutes and curve."""
    import _trainer
    import torch

    tokens = torch.from_numpy(tokens_of(folder / "data/corpus_text_document").astype(np.int64))
    poems = documents_of(tokens_of(folder / "poems/valid_text_document"), eod)
    sizes = (LAYERS, HIDDEN, HEADS, LENGTH)
    model, found = _trainer.train(tokens, padded_vocab(tokens), sizes, BATCH, lr, minutes, seed)
    nats = nats_of(lambda text: model(input_ids=text).logits, poems)
    return {**found, "bits": nats / math.log(2) / characters}


def nano(folder: Path, lr: float, minutes: float, seed: int, eod: int, characters: int) -> dict[str, Any]:
    """Train nanoGPT's model; return its bits per character, steps and seconds."""
    import torch
    from _nano import Nano

    torch.manual_seed(seed)
    train = torch.from_numpy(tokens_of(folder / "data/corpus_text_document").astype(np.int64))
    poems = documents_of(tokens_of(folder / "poems/valid_text_document"), eod)
    vocab = padded_vocab(train)
    model = Nano(vocab, LENGTH, HIDDEN, LAYERS, HEADS)
    step_model = torch.compile(model)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
    dice = torch.Generator().manual_seed(seed)
    window = torch.arange(LENGTH + 1)

    def step(rate: float) -> float:
        for group in optimizer.param_groups:
            group["lr"] = rate
        begins = torch.randint(len(train) - LENGTH, (BATCH, 1), generator=dice)
        loss = step_model(train[begins + window])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    for _ in range(3):  # compilation, without an update
        step(0.0)
    begin = time.perf_counter()
    for _ in range(5):
        step(0.0)
    pace = (time.perf_counter() - begin) / 5
    steps = int(60 * minutes / pace)
    begin = time.perf_counter()
    done = 0
    curve: Curve = []
    summed = 0.0
    # The decay follows the time, so that it is complete when the time is over, whatever else the machine does.
    while (spent := time.perf_counter() - begin) < 60 * minutes:
        share = spent / (60 * minutes)
        decay = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share))
        summed += step(lr * min(1.0, (done + 1) / WARMUP) * decay)
        done += 1
        if done % PER_POINT == 0:
            curve.append(((time.perf_counter() - begin) / 60, summed / PER_POINT))
            summed = 0.0
    bits = nats_of(model.logits, poems) / math.log(2)
    return {"bits": bits / characters, "steps": done, "planned": steps, "minutes": minutes, "curve": curve}


def nats_of(logits_of: Callable[[Any], Any], poems: list[list[int]]) -> float:
    """Return the summed loss of all tokens of the poems in nats; logits_of maps tokens [b, s] to [b, s, vocab]."""
    import torch
    import torch.nn.functional as F

    total = 0.0
    rows = sorted(poems, key=len)
    with torch.no_grad():
        for at in range(0, len(rows), 64):
            batch = [torch.tensor(row[: LENGTH + 1]) for row in rows[at : at + 64]]
            text = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=-100)
            labels = text[:, 1:]
            logits = logits_of(text[:, :-1].clamp(min=0))
            total += float(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100))
    return total


def ours(folder: Path, iterations: int, seed: int, recipe: str) -> dict[str, Any]:
    """Run a script with its flags in a new directory; return its bits per character, minutes and curve."""
    run_dir = folder / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    script, *settings = recipe.split()
    flags = ["--run-dir", str(run_dir), "--train-iters", str(iterations)]
    flags += ["--vocab-file", str(folder / "tokenizer.model"), "--batch-size", str(BATCH // REPLICAS)]
    flags += ["--train-data-path", str(folder / "data/corpus_text_document"), "--seed", str(seed)]
    flags += ["--valid-data-path", str(folder / "poems/valid_text_document"), "--eval-iters", "0"]
    launch = [sys.executable, str(ROOT / "tools/launch.py"), "--standalone", "--nproc-per-node", str(REPLICAS)]
    launch += [str(ROOT / script), *settings, *flags]
    subprocess.run(launch, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    score = [sys.executable, str(ROOT / "examples/poet/poet.py"), str(run_dir), "--json"]
    score += ["--poems", str(folder / "poems/valid.jsonl")]
    scored = subprocess.run(score, check=True, capture_output=True, text=True)
    return {**json.loads(scored.stdout), "steps": iterations, "curve": curve_of(run_dir)}


def curve_of(run_dir: Path) -> Curve:
    """Return the curve of a run's metrics.jsonl; its time is that of the training."""
    found: Curve = []
    minutes = 0.0
    seen = 0
    for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["split"] != "train":
            continue
        minutes += (row["consumed_tokens"] - seen) / row["tokens_per_second"] / 60
        seen = row["consumed_tokens"]
        found.append((minutes, row["lm_loss"]))
    return found


# Value of --peers -> (name in the table, function that trains it)
PEERS = {"nano": ("nanoGPT", nano), "trainer": ("Hugging Face's Trainer", hugging_face)}


def plot(curves: list[tuple[str, Curve]], path: str) -> None:
    """Draw training losses against minutes; curves: (contender, curve) of each run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    colors: dict[str, str] = {}
    for name, curve in curves:
        label = None if name in colors else name
        color = colors.setdefault(name, f"C{len(colors)}")
        minutes = [point[0] for point in curve]
        losses = [point[1] for point in curve]
        axes.plot(minutes, losses, color=color, label=label, linewidth=1)
    axes.set_xlabel("minutes of training on two cores")
    axes.set_ylabel("training loss, nats per token")
    axes.set_ylim(5, 8)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--folder", default="runs/poet", help="directory of run_poet.sh")
    parser.add_argument("--minutes", type=float, default=10.0, help="training time of nanoGPT's model")
    parser.add_argument("--lr", type=float, nargs="+", default=[3e-3], help="its learning rates")
    parser.add_argument("--iterations", type=int, default=0, help="iterations of ours; 0 to leave it out")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--flags", default="", help="further flags of ours")
    parser.add_argument("--ablate", action="store_true", help="train ours without each of its ingredients")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=["nano"], help="contenders for --minutes")
    parser.add_argument("--plain", action="store_true", help="train ours with AdamW instead")
    parser.add_argument("--plot", help="image file for training losses against time")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from data_utils.documents import read_texts
    from megatron.tokenizer import load_tokenizer

    folder = Path(args.folder)
    eod = load_tokenizer(str(folder / "tokenizer.model")).eod
    characters = sum(len(text) for text in read_texts([str(folder / "poems/valid.jsonl")]))
    print("| contender | seed | minutes | steps | bits per character |\n| --- | --- | --- | --- | --- |")
    curves = []
    variants = {"ours": LLAMA}
    if args.ablate:
        variants = {name: f"{LLAMA} {flags}" for name, flags in ABLATIONS.items()}
    if args.plain:
        variants = PLAIN
    for seed in args.seeds:
        for peer, lr in itertools.product(args.peers, args.lr) if args.minutes else ():
            name, train = PEERS[peer]
            found = train(folder, lr, args.minutes, seed, eod, characters)
            curves.append((f"{name}, AdamW {lr:g}", found["curve"]))
            print(_row(curves[-1][0], seed, found), flush=True)
        for name, recipe in variants.items() if args.iterations else ():
            found = ours(folder, args.iterations, seed, f"{recipe} {args.flags}")
            curves.append((name, found["curve"]))
            print(_row(name, seed, found), flush=True)
    if args.plot:
        plot(curves, args.plot)


def _row(name: str, seed: int, found: dict[str, Any]) -> str:
    return f"| {name} | {seed} | {found['minutes']:.2f} | {found['steps']:,} | {found['bits']:.4f} |"


if __name__ == "__main__":
    main()
