#!/usr/bin/env bash
# Surprise: torch.optim.Muon moves a matrix on at full speed for hundreds of steps after its gradient has become zero. Each step
#   orthogonalises the momentum, so its length does not count: 431 further steps have more than half of the first's length, and
#   the matrix moves 439 times its first step in all. SGD with the same momentum moves 19 times its first step, AdamW 5 times. A gradient
#   that is 1,000 times as small still moves the matrix 300 times its first step. Matrices whose gradient is None stand still.
#   Zeros instead of None come from masks, from experts or embeddings without tokens, from zero_grad(set_to_none=False), and from
#   wrappers that sum gradients in flat buffers.
# Versions: torch 2.13.0. Date: 2026-11-29.
# Belief: after the gradient has ended, a momentum of 0.95 adds at most 0.95 + 0.95^2 + ... = 19 steps, and a tenth of
#   a step is left after 45 of them.
# Source: the docstring of torch.optim.Muon (the momentum is an exponential average of the gradients; eps is for stability).
# Cause: _zeropower_via_newtonschulz in torch/optim/_muon.py divides the momentum by its norm, unless the norm is below eps = 1e-7.
#   0.95^k needs about 340 steps for this, and the five iterations enlarge what is left by up to 480, for 120 more steps.
# Depends on: nothing of the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import sys

import torch

MOMENTUM = 0.95
STEPS = 1000
torch.set_num_threads(1)
print("torch", torch.__version__)


def steps_after(make, scale=1.0, absent=False):
    """Return the lengths of the steps after a single gradient, as multiples of the first step."""
    dice = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64, 64, generator=dice))
    gradient = torch.randn(64, 64, generator=dice) * scale
    optimizer = make([weight])
    lengths = []
    for step in range(STEPS + 1):
        if step == 0:
            weight.grad = gradient
        else:
            weight.grad = None if absent else torch.zeros_like(weight)
        before = weight.detach().clone()
        optimizer.step()
        lengths.append((weight.detach() - before).norm().item())
    return [length / lengths[0] for length in lengths[1:]]


def muon(weights):
    return torch.optim.Muon(weights, lr=0.01, weight_decay=0.0, momentum=MOMENTUM)


def sgd(weights):
    return torch.optim.SGD(weights, lr=0.01, momentum=MOMENTUM)


def adamw(weights):
    return torch.optim.AdamW(weights, lr=0.01, weight_decay=0.0)


right = MOMENTUM / (1 - MOMENTUM)
print(f"a momentum of {MOMENTUM} adds {right:.1f} steps after the gradient has ended")
runs = {
    "SGD": steps_after(sgd),
    "AdamW": steps_after(adamw),
    "Muon": steps_after(muon),
    "Muon, gradient * 0.001": steps_after(muon, scale=0.001),
    "Muon, gradient None": steps_after(muon, absent=True),
}
moved = {}
for name, lengths in runs.items():
    moved[name] = sum(lengths)
    full = sum(length > 0.5 for length in lengths)
    print(f"{name}: moves {moved[name]:.1f} first steps further; {full} steps have more than half of the first's length")
print("belief: Muon moves on as SGD with the same momentum does")
holds = abs(moved["SGD"] - right) < 0.1 and moved["AdamW"] < right and moved["Muon, gradient None"] == 0
holds = holds and moved["Muon"] > 20 * right and moved["Muon, gradient * 0.001"] > 14 * right
print("HOLDS: Muon moves a matrix on for hundreds of full steps after its last gradient" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
