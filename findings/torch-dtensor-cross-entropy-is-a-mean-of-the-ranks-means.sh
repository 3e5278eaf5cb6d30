#!/usr/bin/env bash
# Surprise: if the rows of a batch are split over the ranks as DTensors, F.cross_entropy with ignored targets returns the mean of
#   the ranks' own means. The tokens of a rank with few targets count more, so the loss depends on the number of ranks and on
#   the order of the rows: 3.05 on one rank, 3.55 on two, 3.47 on four. A rank whose rows are all ignored turns the loss
#   into NaN. The gradient is that of the right loss, also beside a NaN, so the logged loss is not the one
#   that is trained. Class weights have the same fault. Without
#   weights and ignored targets, all is right.
# Versions: torch 2.13.0 is wrong, torch 2.15.0 (the newest release) is right. Date: 2026-11-29.
# Belief: the loss is that of one process, the mean over all targets that are not ignored.
# Source: the docstring of DTensor (a single-device like abstraction); the docstring of cross_entropy (mean over targets
#   that are not ignored). For uneven batches the same code raises an error, because of a "biased mean result".
# Cause: nll_loss_forward_strategy in torch/distributed/tensor/_ops/_math_ops.py gives the mean the placement Partial("avg"), but
#   the total weight, which the backward pass uses, the placement Partial("sum").
# Depends on: nothing of the machine. The program starts up to four processes on one machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import json
import math
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

TOKENS = 16
VOCABULARY = 8


def batch(name):
    """Return logits and targets. The loss of a token grows with its position."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, VOCABULARY, generator=generator)
    targets = torch.arange(TOKENS) % VOCABULARY
    logits[torch.arange(TOKENS), targets] -= torch.linspace(-1, 3, TOKENS)
    if name == "five of the last eight are ignored":
        targets[[8, 10, 11, 12, 14]] = -100
    if name == "all of the last eight are ignored":
        targets[8:] = -100
    return logits, targets


NAMES = ("no token is ignored", "five of the last eight are ignored", "all of the last eight are ignored")


def worker(rank, ranks, folder):
    """Compute the loss and the gradient of each batch with its rows split over the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    seen = {}
    for name in NAMES:
        logits, targets = batch(name)
        x = distribute_tensor(logits, mesh, [Shard(0)]).requires_grad_()
        loss = F.cross_entropy(x, distribute_tensor(targets, mesh, [Shard(0)]))
        loss.backward()
        seen[name] = (loss.full_tensor().item(), x.grad.full_tensor().tolist())
    if rank == 0:
        with open(f"{folder}/seen.json", "w") as file:
            json.dump(seen, file)
    dist.barrier()
    os._exit(0)  # a normal exit aborts now and then, while gloo's threads end


if __name__ == "__main__":
    print("torch", torch.__version__)
    right = {}
    for name in NAMES:
        logits, targets = batch(name)
        logits.requires_grad_()
        loss = F.cross_entropy(logits, targets)
        loss.backward()
        right[name] = (loss.item(), logits.grad)
        print(f"one process, {name}: loss {loss.item():.3f}")
    losses = {}
    gradients = True
    for ranks in (2, 4):
        with tempfile.TemporaryDirectory(dir=os.getcwd()) as folder:
            mp.spawn(worker, (ranks, folder), nprocs=ranks)
            with open(f"{folder}/seen.json") as file:
                seen = json.load(file)
        for name, (loss, gradient) in seen.items():
            error = (torch.tensor(gradient) - right[name][1]).abs().max().item()
            print(f"{ranks} ranks, {name}: loss {loss:.3f}, largest error of the gradient {error:.1e}")
            losses[ranks, name] = loss
            gradients = gradients and error < 1e-6
    print("belief: the losses are those of one process")
    none, some, full = NAMES
    holds = gradients
    for ranks in (2, 4):
        holds = holds and abs(losses[ranks, none] - right[none][0]) < 1e-4
    holds = holds and abs(losses[2, some] / right[some][0] - 1) > 0.05
    holds = holds and losses[4, some] < losses[2, some] - 0.01 and math.isnan(losses[2, full]) and math.isnan(losses[4, full])
    print("HOLDS: the loss depends on the number of ranks" if holds else "no longer so")
    sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
