#!/usr/bin/env bash
# Surprise: with bf16 weights, optimi's optimizers add the step to the weights with Kahan summation, but multiply the weights by
#   1 - lr * decay in plain bf16, where that factor becomes 1 as long as lr * decay is below 0.002. AdamW, StableAdamW, Lion, Adan,
#   RAdam and Ranger with lr=1e-3 and weight_decay=0.1 leave bf16 weights exactly as a run without weight decay does, bit for bit,
#   while fp32 weights shrink to 0.82 in 2,000 steps. The decay of the README's own example for bf16 does nothing in 20,000 steps.
# Versions: torch-optimi 0.3.3 (the newest release), torch 2.13.0, numpy 2.4.6. Date: 2026-11-30.
# Belief: Kahan summation lets bf16 weights follow fp32 weights, so that small steps are kept, those of the weight decay included.
# Source: torch-optimi's README (matches the performance of mixed precision in pure bf16; the example of Kahan summation with fully
#   decoupled weight decay) and the docstring of AdamW (kahan_sum: more accurate updates in low precision).
# Cause: param.mul_(weight_decay) before the Kahan step in optimi/adam.py and its neighbours; the Triton kernels round the product to
#   bf16 too. If the decay goes into the compensation, as in the program below, bf16 weights shrink to 0.82.
#   SGD adds its decay to the gradient by default and is not affected.
# Checked: no issue of warner-benjamin/optimi says so. Nerogar/OneTrainer has an issue (996) about its own Adam with stochastic rounding.
# Depends on: nothing of the machine. Triton kernels are not used here. packaging is pinned as optimi imports it without requiring it.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 torch-optimi==0.3.3 packaging==26.4 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import sys
from importlib.metadata import version

import optimi
import torch

torch.set_num_threads(1)
STEPS, LR, DECAY = 2000, 1e-3, 0.1
NAMES = ("AdamW", "StableAdamW", "Lion", "Adan", "RAdam", "Ranger")


def train(name, dtype, decay, foreach, gradients, **options):
    """Return weights and their sizes as a share of the initial ones after all steps."""
    torch.manual_seed(0)
    weights = torch.nn.Parameter((0.5 + torch.rand(256)).to(dtype))
    before = weights.detach().double()
    optimizer = getattr(optimi, name)([weights], lr=LR, weight_decay=decay, foreach=foreach, triton=False,
                                         kahan_sum=True, **options)
    for _ in range(STEPS):
        gradient = torch.randn(256) if gradients else torch.zeros(256)
        weights.grad = gradient.to(dtype)
        optimizer.step()
    return weights.detach(), (weights.detach().double() / before).mean().item()


def decay_in_the_compensation(decay):
    """Return the same share for bf16 weights if the decay is added to the Kahan compensation, as the step is."""
    torch.manual_seed(0)
    weights = (0.5 + torch.rand(256)).bfloat16()
    before, rest = weights.double(), torch.zeros(256, dtype=torch.bfloat16)
    for _ in range(STEPS):
        rest.add_(weights, alpha=-LR * decay)
        old = weights.clone()
        weights.add_(rest)
        rest.add_(old - weights)
    return (weights.double() / before).mean().item()


print("torch-optimi", version("torch-optimi"), "torch", torch.__version__)
print(f"{STEPS} steps, lr {LR}, weight decay {DECAY}: exp(-lr * decay * steps) = {(1 - LR * DECAY) ** STEPS:.4f}")
full, half, same, moved = [], [], [], []
for name in NAMES:
    for foreach in (True, False):
        options = {"decouple_lr": True} if name == "RAdam" else {}
        decay = LR * DECAY if options else DECAY
        full.append(train(name, torch.float32, decay, foreach, False, **options)[1])
        half.append(train(name, torch.bfloat16, decay, foreach, False, **options)[1])
        with_decay = train(name, torch.bfloat16, decay, foreach, True, **options)[0]
        without = train(name, torch.bfloat16, 0.0, foreach, True)[0]
        start = train(name, torch.bfloat16, 0.0, foreach, False)[0]
        same.append(torch.equal(with_decay, without))
        moved.append((without != start).double().mean().item())
        print(f"{name:11} foreach={foreach!s:5} no gradients: fp32 {full[-1]:.4f}, bf16 with Kahan {half[-1]:.4f}; random gradients: "
              f"{moved[-1]:.0%} of the bf16 weights moved, equal to a run without decay: {same[-1]}")
possible = decay_in_the_compensation(DECAY)
print(f"bf16, the decay added to the compensation: {possible:.4f}")
edge = {size: train("AdamW", torch.bfloat16, size / LR, True, False)[1] for size in (1e-3, 1.9e-3, 3e-3, 5e-3)}
print("AdamW in bf16, share left by lr * decay:", ", ".join(f"{size}: {share:.3g}" for size, share in edge.items()))
readme = optimi.AdamW([torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))], lr=1e-3, weight_decay=1e-5, decouple_lr=True)
example = readme.param_groups[0]["params"][0]
for _ in range(20000):
    example.grad = torch.zeros(64, dtype=torch.bfloat16)
    readme.step()
left = example.detach().double().mean().item()
print(f"the README's AdamW for bf16 (lr=1e-3, weight_decay=1e-5, decouple_lr=True), 20,000 steps: {left:.4f} "
      f"instead of {0.99999**20000:.4f}")
print("belief: bf16 weights shrink to 0.82 (Ranger 0.90) as fp32 weights do")
holds = max(full) < 0.91 and min(half) == 1 and left == 1 and all(same) and min(moved) > 0.4 and abs(possible - 0.8187) < 0.005
print("HOLDS: weight decay does nothing to bf16 weights with Kahan summation" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
