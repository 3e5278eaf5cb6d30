"""Compare the best learning rates of a narrow and a wide GPT-2, without muP and with it.

    python benchmarks/mup.py --data-path runs/data_text_document --vocab-size 500 --out mup.png -- --init-method-std 0.1

Flags after -- are those of pretrain_gpt2.py. Each model is trained in one process, with a short warm-up and a linear
decay to 0. The figure shows the mean loss of the last fifth of the steps, averaged over seeds. A star marks the best
learning rate of a width.
"""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from _alternate import new_parser

from megatron.config.command_line import parse
from megatron.data.indexed_dataset import IndexedDataset
from megatron.model.gpt2 import GPT2Model
from megatron.model.lr_factors import layer_lr_factors
from megatron.optim import build_optimizer, group_keys

HEAD, SEQ, BATCH, WARMUP = 16, 64, 8, 0.1  # width of a head, tokens of a sample, samples of a step, share of the steps


def final_loss(
    tokens: torch.Tensor, width: int, base: int | None, lr: float, seed: int, args: argparse.Namespace
) -> float:
    """Train one model and return the mean loss of the last fifth of its steps. base: --mup-base-hidden-size."""
    flags = (
        f"--num-layers 2 --hidden-size {width} --num-attention-heads {width // HEAD} --seq-length {SEQ} --seed {seed}"
    )
    flags += f" --vocab-size {args.vocab_size}" + (f" --mup-base-hidden-size {base}" if base else "")
    config = parse([*flags.split(), *args.flags])
    model = GPT2Model(config, parallel_output=False).eval()  # eval: without dropout
    keys = group_keys(model, config.optim, factors=layer_lr_factors(model, config.model))
    optimizer = build_optimizer(keys, config.optim, width=config.model.width_factor)
    dice, losses = np.random.default_rng(seed), []
    for step in range(args.steps):
        starts = dice.integers(0, len(tokens) - SEQ - 1, BATCH)
        text = torch.stack([tokens[at : at + SEQ + 1] for at in starts])
        done = (step + 1) / args.steps
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_factor"] * min(done / WARMUP, (1 - done) / (1 - WARMUP))
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-(args.steps // 5) :]) / (args.steps // 5)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--data-path", required=True)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--lrs", type=float, nargs="+", default=[0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("flags", nargs="*", help="after --: flags of the models")
    args = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    data = IndexedDataset(args.data_path)
    tokens = torch.from_numpy(np.concatenate([data[i] for i in range(data.num_documents)]).astype(np.int64))
    figure, panels = plt.subplots(1, 2, figsize=(8.4, 3.6), dpi=130, sharey=True, layout="constrained")
    print("| muP | width | " + " | ".join(f"{lr:g}" for lr in args.lrs) + " |")
    print("| --- | --- |" + " --- |" * len(args.lrs))
    known: dict[tuple[int, int | None], list[float]] = {}
    for panel, mup in zip(panels, (False, True), strict=True):
        for width in args.widths:
            base = args.widths[0] if mup and width != args.widths[0] else None
            if (width, base) not in known:  # the base model is the same with muP and without
                runs = [
                    [final_loss(tokens, width, base, lr, seed, args) for seed in range(args.seeds)] for lr in args.lrs
                ]
                known[width, base] = [sum(each) / args.seeds for each in runs]
            losses = known[width, base]
            cells = " | ".join(f"{loss:.3f}" for loss in losses)
            print(f"| {'with' if mup else 'without'} | {width} | {cells} |", flush=True)
            best = min(range(len(losses)), key=losses.__getitem__)
            (line,) = panel.semilogx(args.lrs, losses, marker="o", markersize=4, label=f"--hidden-size {width}")
            panel.plot(args.lrs[best], losses[best], "*", markersize=14, color=line.get_color())
        panel.set_title("with muP" if mup else "without muP")
        panel.set_xlabel("--lr")
        panel.set_xticks(args.lrs, labels=[f"{lr:g}" for lr in args.lrs])
        panel.minorticks_off()
        panel.grid(alpha=0.25)
    panels[0].set_ylabel(f"loss after {args.steps} steps")
    panels[1].legend()
    figure.savefig(args.out)


if __name__ == "__main__":
    main()
