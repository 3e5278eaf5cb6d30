#!/usr/bin/env bash
# Surprise: if an optimizer of torch gets its learning rate as a tensor, all parameter groups hold this one tensor, and schedulers
#   write into it. So a schedule of one group is the schedule of all. ReduceLROnPlateau with a factor of 0.5 halves the rate
#   once for each group: two groups get a quarter, ten groups a thousandth. LambdaLR and OneCycleLR give all groups
#   the rate of the last one. The tensor of the caller changes too, so a second optimizer that is made with it starts at the
#   decayed rate. A number as learning rate is right in all cases. There is no message.
# Versions: torch 2.13.0. Release 2.15.0, the newest one, behaves the same. Date: 2026-11-29.
# Belief: a parameter group has its own learning rate, and a tensor of one element is a number in another form.
# Source: PyTorch's page on torch.optim (per-parameter options: each group has its own options, and the keyword arguments are
#   defaults); the docstring of AdamW (lr: float or Tensor); the docstrings of LambdaLR (a list of functions, one for each
#   group) and of ReduceLROnPlateau (new_lr = lr * factor).
# Cause: Optimizer.add_param_group in torch/optim/optimizer.py copies the reference to the default into each group, and
#   _update_param_group_val in torch/optim/lr_scheduler.py fills a tensor in place.
# Depends on: nothing of the machine. A tensor is the recommended form with torch.compile, which would compile again for each new number.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import sys

import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau


def optimizer(rate, groups):
    """Return AdamW with some groups of one weight, which differ in their weight decay."""
    options = [{"params": [torch.nn.Parameter(torch.zeros(1))], "weight_decay": 0.1 * number} for number in range(groups)]
    return torch.optim.AdamW(options, lr=rate, fused=True)


def moves(optimizer):
    """Return how far the weight of each group moves in a first step with gradient 1, which is the learning rate in use."""
    for group in optimizer.param_groups:
        group["params"][0].grad = torch.ones(1)
    optimizer.step()
    return [round(-group["params"][0].item(), 4) for group in optimizer.param_groups]


def plateau(rate, groups):
    chosen = optimizer(rate, groups)
    scheduler = ReduceLROnPlateau(chosen, factor=0.5, patience=0)
    scheduler.step(1.0)
    scheduler.step(1.0)
    return moves(chosen)


def functions(rate):
    chosen = optimizer(rate, 3)
    LambdaLR(chosen, [lambda step: 1.0, lambda step: 0.5, lambda step: 0.1])
    return moves(chosen)


def one_cycle(rate):
    chosen = optimizer(rate, 3)
    OneCycleLR(chosen, max_lr=[1.0, 0.5, 0.1], total_steps=10, div_factor=2)
    return moves(chosen)


def by_hand(rate):
    chosen = optimizer(rate, 3)
    chosen.param_groups[2]["lr"] *= 0.1
    return moves(chosen)


def second_optimizer(rate):
    plateau(rate, 2)
    return moves(optimizer(rate, 1))


RIGHT = {
    "ReduceLROnPlateau, factor 0.5, 1 group": [0.5],
    "ReduceLROnPlateau, factor 0.5, 2 groups": [0.5] * 2,
    "ReduceLROnPlateau, factor 0.5, 10 groups": [0.5] * 10,
    "LambdaLR, factors 1, 0.5 and 0.1": [1.0, 0.5, 0.1],
    "OneCycleLR, start at half of 1, 0.5 and 0.1": [0.5, 0.25, 0.05],
    "a tenth for the third group by hand": [1.0, 1.0, 0.1],
    "a second optimizer with the same rate": [1.0],
}
SHARED = {
    "ReduceLROnPlateau, factor 0.5, 1 group": [0.5],
    "ReduceLROnPlateau, factor 0.5, 2 groups": [0.25] * 2,
    "ReduceLROnPlateau, factor 0.5, 10 groups": [0.001] * 10,
    "LambdaLR, factors 1, 0.5 and 0.1": [0.1] * 3,
    "OneCycleLR, start at half of 1, 0.5 and 0.1": [0.05] * 3,
    "a tenth for the third group by hand": [0.1] * 3,
    "a second optimizer with the same rate": [0.25],
}


def results(make):
    """Return the moves of all cases. make returns a new learning rate of 1."""
    values = (plateau(make(), 1), plateau(make(), 2), plateau(make(), 10), functions(make()), one_cycle(make()),
              by_hand(make()), second_optimizer(make()))
    return dict(zip(RIGHT, values))


print("torch", torch.__version__)
number = results(lambda: 1.0)
tensor = results(lambda: torch.tensor(1.0))
for case in RIGHT:
    print(f"{case}: lr=1.0 {number[case]}, lr=torch.tensor(1.0) {tensor[case]}")
print("belief: both columns are equal")
holds = number == RIGHT and tensor == SHARED
print("HOLDS: a tensor as learning rate is one rate for all groups" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
