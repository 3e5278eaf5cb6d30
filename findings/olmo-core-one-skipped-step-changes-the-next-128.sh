#!/usr/bin/env bash
# Surprise: OLMo-core's optimizers that skip steps with an unusual loss keep the loss of a skipped step among the 128 by which they
#   judge the next ones. (1) After one skipped loss of 12 among losses of 2.0 with a deviation of 0.05, losses of 6, 4, 3 and 2.5 are
#   all trained on, each of which would have been skipped on its own. (2) After one infinite loss, or one gradient norm that overflows,
#   the next 128 normal steps are skipped too, since mean and deviation are no numbers. (3) With infinite gradients, SkipStepAdamW
#   reports a skipped step and its weights are NaN, since it multiplies the update by 0; SkipStepLion keeps them.
# Versions: ai2-olmo-core 3.0.0 (the newest release), torch 2.13.0, numpy 2.4.6. Date: 2026-11-30.
# Belief: a skipped step is left out: it changes neither the weights nor which of the next steps are skipped.
# Source: the docstrings of SkipStepOptimizer (skips updates whose loss or gradient norm is above a number of standard deviations
#   over a rolling interval) and of get_step_factor (0.0 if the optimizer should skip the step).
# Cause: the setters of latest_loss and latest_grad_norm in olmo_core/optim/skip_step_optimizer.py append each value, and
#   adamw_step multiplies gradients and updates by the factor, so that 0 times infinity enters the moments.
# Checked: allenai/OLMo-core pull request 424 (NaN losses in the SkipStepOptimizer; closed in 2025, done otherwise). Release 3.0.0
#   still behaves like this. The first case was not found in any issue.
# Depends on: nothing of the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 ai2-olmo-core==3.0.0 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import sys
from importlib.metadata import version

import torch

torch.set_num_threads(1)
from olmo_core.optim import SkipStepAdamW, SkipStepLion

CALM = 200


def losses(count, seed):
    """Return losses around 2.0 with a standard deviation of 0.05."""
    return (2 + 0.05 * torch.randn(count, generator=torch.Generator().manual_seed(seed))).tolist()


class Run:
    """A training of four weights whose gradients are numbers around 1."""

    def __init__(self, optimizer_class, **options):
        self.weights = torch.nn.Parameter(torch.ones(4))
        self.optimizer = optimizer_class([self.weights], lr=1e-4, weight_decay=0.0, **options)
        self.noise = torch.Generator().manual_seed(1)

    def step(self, loss, gradient=None):
        """Take one step as the documentation asks for, and return whether the optimizer says that it was skipped."""
        gradient = 1 + 0.05 * torch.randn((), generator=self.noise).item() if gradient is None else gradient
        self.weights.grad = torch.full((4,), gradient)
        self.optimizer.latest_loss = torch.tensor(loss)
        self.optimizer.latest_grad_norm = self.weights.grad.norm()
        self.optimizer.step()
        return bool(self.optimizer.step_skipped)

    def calm(self, seed=0):
        """Take normal steps and return how many of them were skipped."""
        return sum(self.step(loss) for loss in losses(CALM, seed))


print("ai2-olmo-core", version("ai2-olmo-core"), "torch", torch.__version__)
holds = True
for optimizer_class in (SkipStepAdamW, SkipStepLion):
    name = optimizer_class.__name__
    first = {}
    for loss in (2.5, 3.0, 4.0, 6.0, 12.0):
        run = Run(optimizer_class)
        assert run.calm() == 0
        first[loss] = run.step(loss)
    run = Run(optimizer_class)
    run.calm()
    spikes = [(loss, run.step(loss)) for loss in (12.0, 6.0, 4.0, 3.0, 2.5)]
    print(f"{name}: a loss after {CALM} losses of about 2.0 is skipped:", first)
    print(f"{name}: the same losses one after the other, the largest first:", dict(spikes))
    holds = holds and all(first.values()) and [skipped for _, skipped in spikes] == [True, False, False, False, False]

    for what, loss, gradient in (("a loss of infinity with normal gradients", float("inf"), 1.0),
                                 ("finite gradients of 1e20, whose norm overflows fp32", 50.0, 1e20)):
        run = Run(optimizer_class)
        run.calm()
        before = run.weights.detach().clone()
        said, kept = run.step(loss, gradient), torch.equal(run.weights.detach(), before)
        later = run.calm(seed=2)
        print(f"{name}: {what}: step skipped {said}, weights kept {kept}; of the next {CALM} normal steps {later} are skipped")
        holds = holds and said and kept and later == 128

    run = Run(optimizer_class)
    run.calm()
    said = run.step(50.0, float("inf"))
    finite = bool(run.weights.isfinite().all())
    print(f"{name}: gradients of infinity: step skipped {said}, weights finite {finite}")
    holds = holds and said and finite == (optimizer_class is SkipStepLion)
print("belief: a skipped step leaves no trace: smaller spikes are skipped too, normal steps are taken, weights stay as they were")
print("HOLDS: one skipped step decides about the next 128" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
