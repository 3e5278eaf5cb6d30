#!/usr/bin/env bash
# Surprise: if lr_scheduler.total_steps is smaller than the number of training steps, torchtitan's learning rate falls below zero after
#   total_steps, and the optimizer climbs the loss. With total_steps=1000 and decay_ratio=0.1, the rate at step 1,300 is -2.6 times the
#   configured one. With linear and sqrt decay it is negative, also with min_lr_factor=0.1; with cosine it rises again. The loss of a
#   linear model with noise rises from 0.009 to 368 in these 300 steps; with a rate that stays at the minimum it is 0.007.
# Versions: torchtitan 0.3.0 (the newest release), torch 2.13.0, numpy 2.4.6. Date: 2026-11-30.
# Belief: after its end a schedule stays at the minimum: at 0, or at min_lr_factor of the rate.
# Source: the comments on the fields of LRSchedulersContainer.Config (total_steps separates the schedule from the training steps;
#   min_lr_factor keeps the rate from falling below that share of the optimizer's).
# Cause: linear_warmup_stable_decay in torchtitan/components/optimizer/lr_scheduler.py has no upper bound for progress. Only a
#   warm-up and a decay that are too long for total_steps are reported.
# Checked: pytorch/torchtitan pull requests 2340 (adds total_steps for runs that stop early), 1284 and 1261; the other direction is
#   not mentioned in them, and no issue was found.
# Depends on: nothing of the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 torchtitan==0.3.0 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import logging
import sys
from importlib.metadata import version

import torch

logging.disable(logging.WARNING)
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.optimizer.optimizer import ParamGroupConfig

torch.set_num_threads(1)
TOTAL, STEPS, FLOOR = 1000, 1300, 0.1


class Line(torch.nn.Module):
    """A linear model of 8 numbers; the loss of a batch of 16 noisy samples has a minimum of 0.01."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8))

    def forward(self, inputs, targets):
        return ((inputs @ self.weight - targets) ** 2).mean()


def train(decay_type, floor, decay_ratio=None, clamp=False):
    """Train for all steps; return the learning rate and the loss of every step, as a share of the configured rate."""
    torch.manual_seed(0)
    model = Line()
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01, "weight_decay": 0.0})
    optimizers = OptimizersContainer.Config(param_groups=[group], implementation="for-loop").build(model_parts=[model])
    settings = LRSchedulersContainer.Config(warmup_steps=100, total_steps=TOTAL, decay_type=decay_type,
                                            decay_ratio=decay_ratio, min_lr_factor=floor)
    schedulers = settings.build(optimizers=optimizers, training_steps=STEPS)
    rates, losses = [], []
    for _ in range(STEPS):
        optimizers.zero_grad()
        inputs = torch.randn(16, 8)
        loss = model(inputs, inputs.sum(1) + 0.1 * torch.randn(16))
        loss.backward()
        lr = optimizers.optimizers[0].param_groups[0]["lr"]
        if clamp:
            lr = max(lr, floor * 0.01)
            optimizers.optimizers[0].param_groups[0]["lr"] = lr
        optimizers.step()
        schedulers.step()
        rates.append(lr / 0.01)
        losses.append(loss.item())
    return rates, losses


print("torchtitan", version("torchtitan"), "torch", torch.__version__)
print(f"total_steps={TOTAL}, training steps {STEPS}, warm-up 100; shares of the configured learning rate")
seen = {}
for decay_type, ratio, floor in (("linear", None, 0.0), ("linear", None, FLOOR), ("linear", 0.1, FLOOR), ("sqrt", None, FLOOR),
                                 ("cosine", None, FLOOR)):
    rates, losses = train(decay_type, floor, ratio)
    seen[decay_type, ratio, floor] = rates
    print(f"{decay_type:6} decay_ratio={ratio} min_lr_factor={floor}: " +
          ", ".join(f"step {step} {rates[step - 1]:.3f}" for step in (500, 1000, 1001, 1100, 1300)))
    if (decay_type, ratio) == ("linear", 0.1):
        wrong = losses
right = train("linear", FLOOR, 0.1, clamp=True)[1]
for step in (1000, 1100, 1300):
    print(f"loss at step {step} with decay_ratio=0.1: {wrong[step - 1]:.2e}; with a rate that stays at the minimum: "
          f"{right[step - 1]:.2e}")
print(f"belief: after step {TOTAL} the rate stays at min_lr_factor (0.0 or {FLOOR})")
linear = seen["linear", None, FLOOR]
holds = min(linear[:TOTAL - 1]) >= FLOOR / 10 and linear[-1] < -0.1 and seen["linear", None, 0.0][-1] < -0.3
holds = holds and seen["linear", 0.1, FLOOR][-1] < -2 and seen["sqrt", None, FLOOR][-1] < FLOOR / 2
holds = holds and seen["cosine", None, FLOOR][-1] > 2 * FLOOR and wrong[-1] > 100 * right[-1]
print("HOLDS: after total_steps the learning rate of torchtitan falls below zero" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
