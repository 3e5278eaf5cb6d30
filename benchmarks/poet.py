"""Bits per character of poems after minutes of training: nanoGPT's model and recipe, and scripts/run_poet.sh.

    TRAIN_ITERS=1 bash scripts/run_poet.sh                        # prepares the poems in runs/poet
    python benchmarks/poet.py --minutes 10 --lr 3e-3 --iterations 300 --seeds 1 2 3

For each seed, nanoGPT's model trains for --minutes, and then ours for --iterations iterations, both with all cores.
nanoGPT is plain compiled torch in fp32: learned positions, layer norms, GELU, AdamW with betas 0.9 and 0.95, weight
decay 0.1, a warm-up of 100 steps, a cosine decay to a tenth of --lr, and random windows of the concatenated poems. Its
clock starts after the compilation. The clock of ours is that of its log. Both have the same tokens, and all poems for
validation are scored one by one, from the beginning of a poem to its end.
"""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from _alternate import ROOT, new_parser

LAYERS, HIDDEN, HEADS, LENGTH, BATCH = 4, 256, 4, 128, 32
WARMUP = 100


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


def nano(folder: Path, lr: float, minutes: float, seed: int, eod: int, characters: int) -> dict[str, Any]:
    """Train nanoGPT's model; return its bits per character, steps and seconds."""
    import torch
    from _nano import Nano

    torch.manual_seed(seed)
    train = torch.from_numpy(tokens_of(folder / "data/corpus_text_document").astype(np.int64))
    poems = documents_of(tokens_of(folder / "poems/valid_text_document"), eod)
    vocab = int(train.max()) + 1
    vocab += -vocab % 64
    model = Nano(vocab, LENGTH, HIDDEN, LAYERS, HEADS)
    step_model = torch.compile(model)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
    dice = torch.Generator().manual_seed(seed)
    window = torch.arange(LENGTH + 1)

    def step(rate: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate
        begins = torch.randint(len(train) - LENGTH, (BATCH, 1), generator=dice)
        step_model(train[begins + window]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(3):  # compilation, without an update
        step(0.0)
    begin = time.perf_counter()
    for _ in range(5):
        step(0.0)
    pace = (time.perf_counter() - begin) / 5
    steps = int(60 * minutes / pace)
    begin = time.perf_counter()
    done = 0
    # The decay follows the time, so that it is complete when the time is over, whatever else the machine does.
    while (spent := time.perf_counter() - begin) < 60 * minutes:
        share = spent / (60 * minutes)
        decay = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share))
        step(lr * min(1.0, (done + 1) / WARMUP) * decay)
        done += 1
    bits = nats_of(model, poems) / math.log(2)
    return {"bits": bits / characters, "steps": done, "planned": steps, "minutes": minutes}


def nats_of(model: Any, poems: list[list[int]]) -> float:
    """Return the summed loss of all tokens of the poems in nats."""
    import torch
    import torch.nn.functional as F

    total = 0.0
    rows = sorted(poems, key=len)
    with torch.no_grad():
        for at in range(0, len(rows), 64):
            batch = [torch.tensor(row[: LENGTH + 1]) for row in rows[at : at + 64]]
            text = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=-100)
            labels = text[:, 1:]
            logits = model.logits(text[:, :-1].clamp(min=0))
            total += float(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100))
    return total


def ours(folder: Path, iterations: int, seed: int, more: list[str]) -> dict[str, Any]:
    """Run the recipe of scripts/run_poet.sh in a new directory; return its bits per character and minutes."""
    run_dir = folder / f"seed{seed}_{iterations}"
    flags = ["--config", str(ROOT / "configs/models/llama_poet.json"), "--run-dir", str(run_dir)]
    flags += ["--vocab-file", str(folder / "tokenizer.model"), "--batch-size", str(BATCH // 2)]
    flags += ["--train-data-path", str(folder / "data/corpus_text_document"), "--seed", str(seed)]
    flags += ["--valid-data-path", str(folder / "poems/valid_text_document"), "--eval-iters", "0"]
    launch = [sys.executable, str(ROOT / "tools/launch.py"), "--standalone", "--nproc-per-node", "2"]
    launch += [str(ROOT / "pretrain_llama.py"), *flags, "--train-iters", str(iterations), *more]
    subprocess.run(launch, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    score = [sys.executable, str(ROOT / "examples/poet/poet.py"), str(run_dir), "--json"]
    score += ["--poems", str(folder / "poems/valid.jsonl")]
    scored = subprocess.run(score, check=True, capture_output=True, text=True)
    return {**json.loads(scored.stdout), "steps": iterations}


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--folder", default="runs/poet", help="directory of run_poet.sh")
    parser.add_argument("--minutes", type=float, default=10.0, help="training time of nanoGPT's model")
    parser.add_argument("--lr", type=float, nargs="+", default=[3e-3], help="its learning rates")
    parser.add_argument("--iterations", type=int, default=0, help="iterations of ours; 0 to leave it out")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--flags", default="", help="further flags of ours")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from data_utils.documents import texts
    from megatron.tokenizer import load_tokenizer

    folder = Path(args.folder)
    eod = load_tokenizer(str(folder / "tokenizer.model")).eod
    characters = sum(len(text) for text in texts([str(folder / "poems/valid.jsonl")]))
    print("| contender | seed | minutes | steps | bits per character |\n| --- | --- | --- | --- | --- |")
    for seed in args.seeds:
        for lr in args.lr:
            if args.minutes:
                found = nano(folder, lr, args.minutes, seed, eod, characters)
                print(_row(f"nanoGPT, AdamW {lr:g}", seed, found), flush=True)
        if args.iterations:
            found = ours(folder, args.iterations, seed, args.flags.split())
            print(_row(f"ours {args.flags}".strip(), seed, found), flush=True)


def _row(name: str, seed: int, found: dict[str, Any]) -> str:
    return f"| {name} | {seed} | {found['minutes']:.2f} | {found['steps']:,} | {found['bits']:.4f} |"


if __name__ == "__main__":
    main()
