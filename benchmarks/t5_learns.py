"""Check that T5 learns: train this project's and transformers' T5 on the same samples and compare their losses.

    python benchmarks/t5_learns.py --data-path runs/t5/data/corpus_text_document --vocab-file runs/t5/tokenizer.model \\
        --iters 200 --json found.json --out docs/images/t5_learns.png
    python benchmarks/t5_learns.py --json found.json --out docs/images/t5_learns.png      plots found.json

The loss of a model that learns falls below the unigram entropy of the masked text. Each run uses one core. Sizes and
samples are those of configs/models/t5_tiny.json; flags after `--` change them. All contenders have the same fused
AdamW, warm-up, cosine decay and clipping, no dropout, and 16 samples a step. Every contender is evaluated on the
validation split, on labels that are neither sentinels nor end tokens. transformers' T5 runs once with its own
initialisation (embeddings of standard deviation 1) and once with this project's initialisation (standard deviation
0.02, output projections scaled by depth, query projections divided by the square root of the head size).
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import _hugging_face
from _alternate import ROOT, new_parser

BATCH, EVALUATED = 16, 160  # number of samples in a step, and in an evaluation
COLOURS = {"ours": "#c2410c", "ours, scores not divided": "#f0a35e", "transformers": "#1d4ed8"}
COLOURS |= {"transformers, our initial values": "#7ba6e8"}
Forward = Callable[[Any], Any]


def build(name: str, config: Any) -> tuple[Any, Forward]:
    """Return a contender's model, and a function from a batch to its logits."""
    from megatron.config.command_line import with_values
    from megatron.model import T5Model

    m = config.model
    if name.startswith("ours"):
        scaled = m.scale_attention and "not divided" not in name
        ours = T5Model(with_values(config, {"scale_attention": scaled}), parallel_output=False)
        return ours, lambda batch: ours(batch["encoder"], batch["decoder"])
    theirs = _hugging_face.t5(m.vocab_size, m.hidden_size, m.ff_size, m.num_layers, m.num_attention_heads, m.head_size)
    if "our initial" in name:
        for weight_name, weight in theirs.named_parameters():
            if weight.dim() > 1:
                weight.data.normal_(0, m.init_method_std * _factor(weight_name, m))
    return theirs, lambda batch: theirs(input_ids=batch["encoder"], decoder_input_ids=batch["decoder"]).logits


def _factor(name: str, m: Any) -> float:
    if name.endswith((".o.weight", ".wo.weight")):
        return float((2 * m.num_layers if name.startswith("encoder") else 3 * m.decoder_layers) ** -0.5)
    return float(m.head_size**-0.5) if name.endswith(".q.weight") else 1.0


def rates(iters: int, peak: float) -> Iterator[float]:
    """Yield learning rates: linear warm-up over a tenth of the steps, then cosine decay to 1% of the peak."""
    up = max(iters // 10, 1)
    for step in range(iters):
        down = 0.5 * (1 + math.cos(math.pi * (step - up) / max(iters - up, 1)))
        yield peak * (step + 1) / up if step < up else peak * (0.01 + 0.99 * down)


def train(name: str, config: Any, parts: tuple[Any, Any], is_text: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Train a contender.

    Return, for each evaluation, loss in nats and accuracy on masked text, and the largest gradient norm since the
    previous evaluation.
    """
    import torch
    import torch.nn.functional as F
    from torch.utils.data import default_collate

    torch.manual_seed(1)
    model, forward = build(name, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1, fused=True)
    batches = [default_collate([parts[1][n] for n in range(at, at + BATCH)]) for at in range(0, EVALUATED, BATCH)]
    found: dict[str, Any] = {"iteration": [], "text_loss": [], "text_accuracy": [], "grad_norm": [], "seconds": 0.0}

    @torch.no_grad()
    def evaluate() -> tuple[float, float]:
        nats = right = tokens = 0.0
        for batch in batches:
            chosen = is_text(batch["labels"])
            logits, labels = forward(batch)[chosen], batch["labels"][chosen]
            nats += F.cross_entropy(logits, labels, reduction="sum").item()
            right, tokens = right + (logits.argmax(-1) == labels).sum().item(), tokens + len(labels)
        return nats / tokens, right / tokens

    largest, begin = 0.0, time.perf_counter()
    for step, rate in enumerate(rates(args.iters, args.lr), start=1):
        batch = default_collate([parts[0][n] for n in range(step * BATCH - BATCH, step * BATCH)])
        labels = batch["labels"].masked_fill(batch["loss_mask"] == 0, -100)
        F.cross_entropy(forward(batch).flatten(0, 1), labels.flatten()).backward()
        largest = max(largest, torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        if step % args.every == 0 or step == args.iters:
            found["seconds"] += time.perf_counter() - begin
            loss, accuracy = evaluate()
            for key, value in zip(
                ("iteration", "text_loss", "text_accuracy", "grad_norm"), (step, loss, accuracy, largest), strict=True
            ):
                found[key].append(value)
            print(
                f"{name} | {step} | text loss {loss:.3f} | {accuracy:.1%} | grad norm up to {largest:.1f}", flush=True
            )
            largest, begin = 0.0, time.perf_counter()
    return found


def measure(args: argparse.Namespace) -> None:
    """Train the contenders for which the file of --json has no results yet."""
    import torch

    from megatron.config.command_line import parse, with_values
    from megatron.tasks.t5 import T5, is_text
    from megatron.tokenizer import load_tokenizer
    from megatron_tools.report.unigram import target_entropies

    torch.set_num_threads(1)
    files = ["--data-path", args.data_path, "--vocab-file", args.vocab_file, "--split", "90,10,0"]
    preset = ["--config", str(ROOT / "configs/models/t5_tiny.json"), "--hidden-dropout", "0"]
    config = parse([*preset, *files, "--make-vocab-size-divisible-by", "1", *args.flags])
    tokenizer = T5().extended(config, load_tokenizer(args.vocab_file))
    config = with_values(config, {"vocab_size": tokenizer.vocab_size})
    datasets, notes = T5().datasets(config, tokenizer)
    print(*notes, sep="\n")
    unigram = target_entropies(config, EVALUATED)
    path = Path(args.json)
    known = json.loads(path.read_text()) if path.exists() else {"unigram": unigram and unigram.text, "runs": {}}
    print(f"unigram entropy of the masked text: {known['unigram']:.3f}")
    for name in args.contenders or COLOURS:
        if name not in known["runs"]:
            looks = partial(is_text, tokenizer)
            known["runs"][name] = train(name, config, cast(Any, datasets[:2]), looks, args)
            path.write_text(json.dumps(known, indent=1))


def draw(found: dict[str, Any], out: str) -> None:
    """Plot the losses, and print a table for the docs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 4.2), dpi=130, layout="constrained")
    print(
        "| | masked text, nats/token | below unigram | accuracy | "
        f"largest gradient norm in the second half of training |\n|{' --- |' * 5}"
    )
    for name, run in found["runs"].items():
        axes.plot(run["iteration"], run["text_loss"], marker="o", markersize=3.5, label=name, color=COLOURS.get(name))
        last, largest = run["text_loss"][-1], max(run["grad_norm"][len(run["grad_norm"]) // 2 :])
        below, accuracy = found["unigram"] - last, run["text_accuracy"][-1]
        print(f"| {name} | {last:.3f} | {below:+.3f} | {accuracy:.1%} | {largest:.1f} |")
    axes.axhline(
        found["unigram"], color="#525252", linestyle="--", linewidth=1.2, label="unigram entropy of the masked text"
    )
    losses = [loss for run in found["runs"].values() for loss in run["text_loss"]]
    # Limit the range, because a curve may start far above the other losses.
    axes.set_ylim(min(losses) - 0.15, min(max(losses) + 0.15, found["unigram"] + 1.5))
    axes.set_xlabel("iteration")
    axes.set_ylabel("validation, nats per masked text token")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(facecolor="white", edgecolor="none", framealpha=0.9)
    figure.savefig(out)


def main() -> None:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--data-path", help="prefix of the .bin/.idx pair")
    add("--vocab-file")
    add("--contenders", nargs="+", choices=list(COLOURS), help="contenders to train (default: all)")
    add("--iters", type=int, default=200)
    add("--every", type=int, default=25, help="iterations between evaluations (default: 25)")
    add("--lr", type=float, default=2e-3)
    add("--json", required=True, help="JSON file of results; runs that it contains are skipped")
    add("--out", help="file for the plot")
    add("flags", nargs="*", help="flags of pretrain_t5.py; write them after --")
    args = parser.parse_args()
    if args.data_path:
        measure(args)
    if args.out:
        draw(json.loads(Path(args.json).read_text()), args.out)


if __name__ == "__main__":
    main()
