#!/usr/bin/env bash
# Surprise: F.mse_loss of sharded DTensors has the right value and a gradient that is as many times too large as the mesh
#   has ranks: 2 on two ranks, 4 on four. smooth_l1_loss, huber_loss and soft_margin_loss do the same. l1_loss,
#   binary_cross_entropy_with_logits and ((x - y) ** 2).mean() are right. With Adam, or with clipping below the
#   norm, training is not affected. With SGD or several losses, the run depends on the number of ranks: in a sum of
#   a mean squared error and a cross entropy, the first one gets a larger weight on more ranks.
# Versions: torch 2.13.0. Release 2.15.0, the newest one, behaves the same. Date: 2026-11-29.
# Belief: an operation on DTensors gives the result of the same operation in one process, its gradient included.
# Source: the docstring of DTensor (a single-device like abstraction to program with multi-device tensors) and that of mse_loss (mean: the sum is divided by the number of elements of the output).
# Cause: mse_loss_backward has no rule of its own. DecompShardingStrategy in torch/distributed/tensor/_decompositions.py takes
#   the placement from a decomposition of the operation, in which the number of elements is that of the whole tensor. Then
#   every rank runs the undivided operation on its part, which divides by the number of elements of this part.
# Depends on: nothing of the machine. The program starts up to four processes on one machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import json
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

LOSSES = {
    "mse_loss": F.mse_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "soft_margin_loss": lambda output, target: F.soft_margin_loss(output, target.sign()),
    "l1_loss": F.l1_loss,
    "binary_cross_entropy_with_logits": lambda output, target: F.binary_cross_entropy_with_logits(output, target.sigmoid()),
    "((x - y) ** 2).mean()": lambda output, target: ((output - target) ** 2).mean(),
}
WRONG = ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss")


def worker(rank, ranks, folder):
    """Train one step of a linear model whose batch is split over the ranks, and compare with one process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    generator = torch.Generator().manual_seed(0)
    inputs, targets, weight = (torch.randn(shape, generator=generator) for shape in ((24, 5), (24, 3), (3, 5)))
    seen = {}
    for name, loss_fn in LOSSES.items():
        single_weight = weight.clone().requires_grad_()
        single_loss = loss_fn(F.linear(inputs, single_weight), targets)
        single_loss.backward()
        x, y = (distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in (inputs, targets))
        split_weight = distribute_tensor(weight, mesh, [Replicate()]).requires_grad_()
        loss = loss_fn(F.linear(x, split_weight), y)
        loss.backward()
        value = loss.full_tensor().item() / single_loss.item()
        factor = split_weight.grad.full_tensor() / single_weight.grad
        assert torch.allclose(factor, factor.mean(), rtol=1e-3)
        seen[name] = (round(value, 3), round(factor.mean().item(), 3))
    if rank == 0:
        with open(f"{folder}/seen.json", "w") as file:
            json.dump(seen, file)
    dist.barrier()
    os._exit(0)  # a normal exit aborts now and then, while gloo's threads end


if __name__ == "__main__":
    print("torch", torch.__version__)
    holds = True
    for ranks in (2, 4):
        with tempfile.TemporaryDirectory(dir=os.getcwd()) as folder:
            mp.spawn(worker, (ranks, folder), nprocs=ranks)
            with open(f"{folder}/seen.json") as file:
                seen = json.load(file)
        for name, (value, factor) in seen.items():
            print(f"{ranks} ranks, {name}: loss {value} times that of one process, gradient {factor} times")
            holds = holds and value == 1.0 and factor == (ranks if name in WRONG else 1.0)
    print("belief: all losses and gradients are 1.0 times those of one process")
    print("HOLDS: the gradient of mse_loss is 4 times too large on 4 ranks" if holds else "no longer so")
    sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
