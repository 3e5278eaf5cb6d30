#!/usr/bin/env bash
# Surprise: torch.optim.Muon with bf16 weights and nesterov=False divides its momentum by the norm of the momentum in each step,
#   in place. The next gradient then meets a momentum of norm 1. Gradients with a norm up to 1 never overcome it: after
#   the gradient has turned around, the weight moves on in the old direction for 100 steps and more, when 10 are right. Gradients
#   with a norm of 100 outweigh it at once, after 1 step. fp32 weights, nesterov=True and torch 2.15 are right.
# Versions: torch 2.13.0. Date: 2026-11-29.
# Belief: the momentum is a moving average of the gradients, so a step does not depend on their common factor, and bf16 weights
#   turn when fp32 weights do.
# Source: the docstring of torch.optim.Muon (B_t = mu B_{t-1} + g_t, and the update is the orthogonalised B_t).
# Cause: _zeropower_via_newtonschulz in torch/optim/_muon.py calls grad.bfloat16(), which returns the momentum buffer itself if it
#   is bf16, and then div_() on it. torch 2.15 copies it.
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
LIMIT = 100
torch.set_num_threads(1)
print("torch", torch.__version__)
direction = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
direction = direction / direction.norm()


def right_steps():
    """Return the steps after which the moving average of 20 gradients g has turned around under gradients -g."""
    average = 0.0
    for _ in range(20):
        average = MOMENTUM * average + (1 - MOMENTUM)
    steps = 0
    while average > 0:
        average = MOMENTUM * average - (1 - MOMENTUM)
        steps += 1
    return steps


def steps_to_turn(dtype, norm, nesterov):
    """Return the steps with gradients -g, after 20 with g, until the weight moves against g no longer."""
    weight = torch.nn.Parameter(torch.zeros(16, 32, dtype=dtype))
    optimizer = torch.optim.Muon([weight], lr=0.1, weight_decay=0.0, momentum=MOMENTUM, nesterov=nesterov)
    for step in range(20 + LIMIT):
        gradient = direction * norm if step < 20 else -direction * norm
        weight.grad = gradient.to(dtype)
        weight.data.zero_()
        optimizer.step()
        moved_with_new_gradient = (weight.detach().float() * direction).sum() > 0
        if step >= 20 and moved_with_new_gradient:
            return step - 19
    return LIMIT + 1  # not within the limit


right = right_steps()
print(f"the average of the gradients turns around after {right} steps")
turns = {}
for nesterov in (False, True):
    for dtype in (torch.float32, torch.bfloat16):
        for norm in (0.01, 1.0, 100.0):
            turns[nesterov, dtype, norm] = steps_to_turn(dtype, norm, nesterov)
            print(f"nesterov={nesterov}, {dtype}, gradients of norm {norm}: the weight turns after {turns[nesterov, dtype, norm]} steps")
print("belief: without nesterov, the weight turns with the average of the gradients, in every dtype and for every norm")
holds = True
for norm in (0.01, 1.0, 100.0):
    holds = holds and abs(turns[False, torch.float32, norm] - right) <= 1
holds = holds and turns[False, torch.bfloat16, 0.01] > LIMIT and turns[False, torch.bfloat16, 100.0] == 1
print("HOLDS: with bf16 weights, the norm of the gradients decides whether the momentum counts" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
