#!/usr/bin/env bash
# Surprise: AdamWScheduleFree takes far too large steps with a weight whose first gradient comes late, such as a layer that is unfrozen or
#   an expert that no token has chosen before. If it comes after 2,000 steps of other weights, the first step is 29 learning rates
#   instead of 1, and the first 100 steps add up to 553 learning rates instead of 100. A parameter group of its own from the start
#   does not change the first step. torch.optim.AdamW takes steps of one learning rate. RAdamScheduleFree takes a first step of 24
#   learning rates, where its own warm-up begins with a step near 0. There is no message.
# Versions: schedulefree 1.4.1 (the newest release), torch 2.13.0, numpy 2.4.6. Date: 2026-11-30.
# Belief: the bias correction of a weight counts the updates of that weight, as in torch.optim.AdamW, so a constant gradient gives steps
#   of one learning rate.
# Source: schedulefree's README (drop-in replacement for the optimizers of torch, AdamW included) and Kingma and Ba 2015, section 3.
# Cause: step() in schedulefree/adamw_schedulefree.py corrects the second moment by 1 - beta2 ** (k + 1) with the counter k of the group,
#   while exp_avg_sq of the weight starts from zero at its own first gradient.
# Depends on: nothing of the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 schedulefree==1.4.1 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import sys
from importlib.metadata import version

import torch
from schedulefree import AdamWScheduleFree, RAdamScheduleFree

RATE, BETA = 1e-3, 0.999


def train(make, late, steps, own_group=False):
    """Return how far a weight of zero has come, in learning rates, after 1 and after all steps with a gradient of 0.1.

    Another weight of the optimizer has the same gradient from the start; this one has none in the first `late` steps.
    """
    first = torch.nn.Parameter(torch.zeros(1))
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = make([{"params": [first]}, {"params": [weight]}] if own_group else [first, weight])
    if hasattr(optimizer, "train"):
        optimizer.train()
    distances = []
    for step in range(late + steps):
        first.grad = torch.full((1,), 0.1)
        weight.grad = torch.full((1,), 0.1) if step >= late else None
        optimizer.step()
        if step >= late:
            # z is the weight that the steps are added to; the weight itself is an average in a schedule-free optimizer
            distances.append(-optimizer.state[weight].get("z", weight).item() / RATE)
    return distances[0], distances[-1]


def formula(late, steps):
    """Return the same with the second moment of one weight and the step counter of another."""
    square, total, distances = 0.0, 0.0, []
    for step in range(late, late + steps):
        square = BETA * square + (1 - BETA) * 0.01
        total += 0.1 / (square / (1 - BETA ** (step + 1))) ** 0.5
        distances.append(total)
    return distances[0], distances[-1]


optimizers = {
    "torch.optim.AdamW": lambda params: torch.optim.AdamW(params, lr=RATE, betas=(0.9, BETA), weight_decay=0.0),
    "AdamWScheduleFree": lambda params: AdamWScheduleFree(params, lr=RATE, betas=(0.9, BETA)),
    "RAdamScheduleFree": lambda params: RAdamScheduleFree(params, lr=RATE, betas=(0.9, BETA)),
}
print("schedulefree", version("schedulefree"), "torch", torch.__version__)
seen = {}
for name, make in optimizers.items():
    for late in (0, 200, 2000):
        seen[name, late] = train(make, late, 100)
        print(f"{name}, first gradient after {late} steps: first step {seen[name, late][0]:.2f} lr, 100 steps {seen[name, late][1]:.1f} lr")
right = {late: formula(late, 100) for late in (200, 2000)}
print("the counter of the group with the second moment of the weight:", {late: [round(x, 2) for x in pair] for late, pair in right.items()})
frozen = train(optimizers["AdamWScheduleFree"], 2000, 100, own_group=True)
print(f"AdamWScheduleFree, the late weight in a group of its own that counts the 2,000 steps, too: {frozen[0]:.2f} lr")
weight = torch.nn.Parameter(torch.zeros(1))
alone = AdamWScheduleFree([weight], lr=RATE, betas=(0.9, BETA))
alone.train()
weight.grad = torch.full((1,), 0.1)
alone.step()
single = -alone.state[weight]["z"].item() / RATE
print(f"AdamWScheduleFree, a new optimizer for the late weight: {single:.2f} lr")
print("belief: 1 lr and 100 lr whenever the gradients start")
holds = all(abs(seen["torch.optim.AdamW", late][0] - 1) < 1e-3 and abs(seen["torch.optim.AdamW", late][1] - 100) < 0.1 for late in (0, 200, 2000))
holds = holds and abs(seen["AdamWScheduleFree", 0][0] - 1) < 1e-3 and abs(seen["AdamWScheduleFree", 0][1] - 100) < 0.1 and abs(single - 1) < 1e-3
holds = holds and frozen[0] > 29
for late in (200, 2000):
    holds = holds and all(abs(a / b - 1) < 1e-3 for a, b in zip(seen["AdamWScheduleFree", late], right[late]))
holds = holds and seen["AdamWScheduleFree", 2000][0] > 29 and seen["RAdamScheduleFree", 2000][0] > 20
print("HOLDS: late weights take steps of many learning rates" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
