#!/usr/bin/env bash
# Surprise: ema-pytorch's update_every, which is there "to save on compute", changes what is averaged. With update_every=10, as in its
#   README, PostHocEMA(sigma_rels=(0.05, 0.28)) gives averages whose relative widths are 0.25 and 0.21, in reverse order. In the
#   average for 0.28, the weights of the first step have a share of 52 %, and its mean lies at 10 % of the run, not at 54 %. An
#   average synthesised for 0.15 has a width of 0.32. With update_every=100, the default of KarrasEMA, the mean lies at 1 % of the
#   run. EMA with power=1, "a simple average", gives 56 % to the first step, and EMA with beta=0.99 has a mean age of
#   834 steps instead of 100. With update_every=1 all of this is right.
# Versions: ema-pytorch 0.8.3 (the newest release), torch 2.13.0, numpy 2.4.6. Date: 2026-11-29.
# Belief: with fewer updates the same average is computed more coarsely: widths of 0.05 and 0.28 within a few per cent.
# Source: ema-pytorch's README (update_every: how often to actually update, to save on compute), the docstring of EMA (gamma=1 and
#   power=1 implements a simple average), and Karras et al. 2024, section 3.1 (sigma_rel is the standard deviation of the
#   averaging profile, relative to the length of the run; the profile is a power of the step).
# Cause: KarrasEMA.beta in ema_pytorch/post_hoc_ema.py and EMA.get_current_decay in ema_pytorch.py give the decay of one
#   step, and update_moving_average applies it once for update_every steps. The program below takes the product of the
#   decays of the steps in between, and gets the right width with as few updates.
# Depends on: nothing of the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 ema-pytorch==0.8.3 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import sys
from importlib.metadata import version

import numpy as np
import torch
from ema_pytorch import EMA, PostHocEMA
from ema_pytorch.post_hoc_ema import KarrasEMA

STEPS = 2000


class Model(torch.nn.Module):
    """A model whose weights in step t are the unit vector t, so an average shows the share of each step."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(STEPS))


def train(make):
    """Train for all steps and return the object that averages."""
    model = Model()
    average = make(model)
    for step in range(STEPS):
        with torch.no_grad():
            model.weight.zero_()
            model.weight[step] = 1
        average.update()
    return average


def profile(shares):
    """Return mean and standard deviation of the averaged steps, relative to the run, and the share of step 0."""
    shares = np.asarray(shares, dtype=np.float64)
    assert abs(shares.sum() - 1) < 1e-3
    steps = (np.arange(STEPS) + 0.5) / STEPS
    mean = (shares * steps).sum()
    return mean, np.sqrt((shares * (steps - mean) ** 2).sum()), shares[0]


def of(module):
    return profile(module.ema_model.weight.detach().numpy())


def exponent(sigma):
    """Return gamma of the profile step ** gamma whose relative width is sigma, by bisection."""
    low, high = -0.4, 1000.0
    for _ in range(200):
        gamma = (low + high) / 2
        if (gamma + 1) / ((gamma + 2) ** 2 * (gamma + 3)) > sigma**2:
            low = gamma
        else:
            high = gamma
    return gamma


def power_profile(sigma, every):
    """Average with every-th steps only; each update has the product of the decays of the steps since the last one."""
    shares = np.zeros(STEPS)
    shares[0] = 1
    for step in range(every, STEPS, every):
        decay = ((step + 1 - every) / (step + 1)) ** (1 + exponent(sigma))
        shares *= decay
        shares[step] += 1 - decay
    return profile(shares)


def text(values):
    return "mean {:.3f}, width {:.3f}, share of the first step {:.3f}".format(*values)


print("ema-pytorch", version("ema-pytorch"), "torch", torch.__version__, "numpy", np.__version__)
seen = {}
for every in (1, 10):
    print(f"PostHocEMA, sigma_rels 0.05 and 0.28, update_every={every}, {STEPS} steps")
    emas = train(lambda model: PostHocEMA(model, sigma_rels=(0.05, 0.28), update_every=every,
                                          checkpoint_every_num_steps=100, checkpoint_dtype=torch.float32,
                                          checkpoint_folder=f"checkpoints{every}"))
    for sigma, module in zip((0.05, 0.28), emas.ema_models):
        seen[sigma, every] = of(module)
        print(f"  sigma_rel {sigma}: {text(seen[sigma, every])}")
    seen[0.15, every] = of(emas.synthesize_ema_model(sigma_rel=0.15))
    print(f"  sigma_rel 0.15, synthesised: {text(seen[0.15, every])}")
right = {}
for sigma in (0.05, 0.28):
    right[sigma] = power_profile(sigma, 10)
    gamma = exponent(sigma)
    print(f"every 10th step with the decay of 10 steps, {sigma}: {text(right[sigma])}; "
          f"the formula's mean is {(gamma + 1) / (gamma + 2):.3f}")
default = of(train(lambda model: KarrasEMA(model, sigma_rel=0.28)))
print(f"KarrasEMA with its default update_every, sigma_rel 0.28: {text(default)}")
for every in (1, 10):
    seen["simple", every] = of(train(lambda model: EMA(model, beta=1 - 1e-9, power=1.0, update_after_step=0,
                                                       update_every=every)))
    print(f"EMA with power=1, update_every={every}: {text(seen['simple', every])}; a simple average: mean 0.5, width 0.289")
    seen["beta", every] = of(train(lambda model: EMA(model, beta=0.99, update_after_step=0, update_every=every)))
    print(f"EMA with beta=0.99, update_every={every}: {text(seen['beta', every])}; 100 steps are 0.05")
print("belief: widths of 0.05, 0.28 and 0.15 with update_every=10;",
      "seen: {:.3f}, {:.3f} and {:.3f}".format(*(seen[sigma, 10][1] for sigma in (0.05, 0.28, 0.15))))
holds = all(abs(seen[sigma, 1][1] / sigma - 1) < 0.02 for sigma in (0.05, 0.28, 0.15))
holds = holds and all(abs(right[sigma][1] / sigma - 1) < 0.05 for sigma in right)
holds = holds and seen[0.05, 10][1] > 0.2 and 0.18 < seen[0.28, 10][1] < 0.24 and seen[0.15, 10][1] > 0.28
holds = holds and seen[0.28, 10][2] > 0.5 and seen[0.28, 10][0] < 0.12 and default[0] < 0.02
holds = holds and abs(seen["simple", 1][0] - 0.5) < 0.01 and seen["simple", 10][2] > 0.5
holds = holds and 1 - seen["beta", 1][0] < 0.06 and 1 - seen["beta", 10][0] > 0.35
print("HOLDS: update_every=10 averages over other steps" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
