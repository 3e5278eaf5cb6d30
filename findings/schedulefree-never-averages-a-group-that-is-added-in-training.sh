#!/usr/bin/env bash
# Surprise: a parameter group that is added to a schedule-free optimizer after optimizer.train() keeps its training weights at
#   optimizer.eval(), while the other groups switch to their averages. So it is evaluated and saved without averaging. The first
#   evaluation also changes the training: the train() after it moves the group a tenth of the way to z, the weights that the steps
#   are added to, as if eval() had switched it. So the final weights depend on whether a validation took place. A group that is
#   given to the constructor is right. Lightning's BaseFinetuning adds its groups in this way. There is no message.
# Versions: schedulefree 1.4.1 (the newest release), torch 2.13.0, numpy 2.4.6. Date: 2026-11-30.
# Belief: eval() switches all groups to their averages, and train() after it restores the training weights of all groups.
# Source: schedulefree's README (call optimizer.eval() before an evaluation or a checkpoint, and optimizer.train() before training) and the
#   documentation of torch.optim.Optimizer.add_param_group (can be useful when fine tuning, as frozen layers are made trainable).
# Cause: each group holds its mode as train_mode, whose default is False. add_param_group is inherited from torch, so the new group is
#   marked as in evaluation mode, and step() in schedulefree/adamw_schedulefree.py checks only the mode of the first group.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 schedulefree==1.4.1 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import sys
from importlib.metadata import version

import torch
from schedulefree import AdamWScheduleFree, RAdamScheduleFree, SGDScheduleFree

STEPS = 20


def train(make, is_added, validations):
    """Train two equal weights to zero and return, for both, the weights of training, of evaluation and of the end.

    The second one is in a group of its own, which is added after train() or given to the constructor.
    """
    weights = [torch.nn.Parameter(torch.full((1,), 5.0)) for _ in range(2)]
    optimizer = make([{"params": [weight]} for weight in (weights[:1] if is_added else weights)])
    optimizer.train()
    if is_added:
        optimizer.add_param_group({"params": [weights[1]]})
    for _ in range(STEPS):
        for weight in weights:
            weight.grad = weight.detach().clone()
        optimizer.step()
    training = [weight.item() for weight in weights]
    optimizer.eval()
    evaluation = [weight.item() for weight in weights]
    optimizer.train()
    for _ in range(validations - 1):
        optimizer.eval()
        optimizer.train()
    return training, evaluation, [weight.item() for weight in weights]


makers = {
    "AdamWScheduleFree": lambda groups: AdamWScheduleFree(groups, lr=0.1),
    "RAdamScheduleFree": lambda groups: RAdamScheduleFree(groups, lr=0.1),
    "SGDScheduleFree": lambda groups: SGDScheduleFree(groups, lr=0.1),
}
print("schedulefree", version("schedulefree"), "torch", torch.__version__)
holds = True
for name, make in makers.items():
    right = train(make, False, 1)
    wrong = train(make, True, 1)
    for how, (training, evaluation, end) in (("given", right), ("added", wrong)):
        print(f"{name}, second group {how}: in training {training[0]:.4f} and {training[1]:.4f}, after eval() {evaluation[0]:.4f} and "
              f"{evaluation[1]:.4f}, after train() {end[0]:.4f} and {end[1]:.4f}")
    holds = holds and all(abs(pair[0] - pair[1]) < 1e-6 for pair in right) and abs(right[2][0] - right[0][0]) < 1e-5
    holds = holds and abs(wrong[0][0] - wrong[0][1]) < 1e-6 and wrong[1][1] == wrong[0][1]
    holds = holds and abs(wrong[1][0] - wrong[1][1]) > 0.002 and abs(wrong[2][1] - wrong[0][1]) > 0.002
print("belief: both weights are equal at each time, and the last value is the first")
print("HOLDS: an added group is not averaged, and an evaluation moves it" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
