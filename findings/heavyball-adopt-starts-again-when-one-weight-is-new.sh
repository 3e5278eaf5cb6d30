#!/usr/bin/env bash
# Surprise: when one weight of heavyball's ADOPT gets its first gradient, the whole parameter group starts again: no weight of the group
#   is updated in this step, and each second moment is replaced by the square of the gradient of this step. In the next step, 10,000
#   other weights with standard normal gradients take steps of up to 4,440 learning rates instead of 0.9. After 20 steps, they differ
#   by up to 38,000 learning rates from a run without the new weight. This happens whenever an expert is chosen for the first time or
#   a layer is unfrozen. multi_tensor=False, which updates one weight at a time, is right; the default is True. AdamW of the same
#   package is right, too. SUDSAdamW (not shown here) resets its state in the same way. There is no message.
# Versions: heavyball 3.2.1 (the newest release), torch 2.13.0, numpy 2.4.6. Date: 2026-11-30.
# Belief: ADOPT works element by element, so the updates of a weight do not depend on the gradients of another weight.
# Source: the paper of ADOPT (Taniguchi et al. 2024, algorithm 2: the second moment is initialised with the first gradient, then an
#   element-wise recursion); heavyball's README (multi_tensor updates many tensors at once, for speed).
# Cause: WarmupGuard in heavyball/chainable.py takes the smallest warm-up counter of all weights that have a gradient. If one of these
#   weights is new, it applies the warm-up function to all of them.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 heavyball==3.2.1 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import sys
import warnings
from importlib.metadata import version

warnings.filterwarnings("ignore")
import heavyball
import torch

heavyball.utils.compile_mode = None  # plain torch, without a compiler
SIZE, LATE, STEPS, RATE = 10000, 500, 520, 1e-3


def train(kind, has_other, **options):
    """Return the largest change of 10,000 weights in each step, in learning rates, and the weights at the end.

    Another weight of the same optimizer has its first gradient in step LATE, if there is one.
    """
    generator = torch.Generator().manual_seed(0)
    weight, other = torch.nn.Parameter(torch.zeros(SIZE)), torch.nn.Parameter(torch.zeros(4))
    optimizer = kind([weight, other] if has_other else [weight], lr=RATE, betas=(0.9, 0.99), **options)
    changes = []
    for step in range(STEPS):
        weight.grad = torch.randn(SIZE, generator=generator)
        other.grad = torch.ones(4) if has_other and step >= LATE else None
        before = weight.detach().clone()
        optimizer.step()
        changes.append((weight.detach() - before).abs().max().item() / RATE)
    return changes, weight.detach()


def by_hand():
    """ADOPT as in the paper, for the weights alone."""
    generator = torch.Generator().manual_seed(0)
    weight, mean = torch.zeros(SIZE, dtype=torch.float64), torch.zeros(SIZE, dtype=torch.float64)
    for step in range(STEPS):
        gradient = torch.randn(SIZE, generator=generator).double()
        if step == 0:
            square = gradient**2
            continue
        # like AdamW of this package, it has debiased decay rates
        beta1, beta2 = ((beta - beta**n) / (1 - beta**n) for beta, n in ((0.9, step), (0.99, step + 1)))
        mean = beta1 * mean + (1 - beta1) * gradient / square.sqrt().clamp(min=1e-8)
        weight -= RATE * mean
        square = beta2 * square + (1 - beta2) * gradient**2
    return weight


print("heavyball", version("heavyball"), "torch", torch.__version__, "-", SIZE, "weights; another one has its first gradient in step", LATE)
seen = {}
for name, kind, options in (("AdamW", heavyball.AdamW, {}), ("ADOPT", heavyball.ADOPT, {}),
                            ("ADOPT, multi_tensor=False", heavyball.ADOPT, {"multi_tensor": False})):
    alone, last = train(kind, False, **options)
    changes, end = train(kind, True, **options)
    seen[name] = (alone, changes, (end - last).abs().max().item() / RATE)
    print(f"{name}: largest step of the weights in the steps {LATE - 1} to {LATE + 2}:", [round(change, 2) for change in changes[LATE - 1 : LATE + 3]],
          "lr; without the other weight:", [round(change, 2) for change in alone[LATE - 1 : LATE + 3]],
          f"lr; after {STEPS} steps, the weights differ by up to {seen[name][2]:.2f} lr")
distance = (by_hand() - train(heavyball.ADOPT, False)[1]).abs().median().item() / RATE
print(f"ADOPT by hand differs from heavyball's without the other weight by {distance:.1e} lr (median)")
print("belief: the other weight changes nothing for these")
holds = all(seen[name][2] < 1e-3 for name in ("AdamW", "ADOPT, multi_tensor=False"))
alone, changes, difference = seen["ADOPT"]
holds = holds and changes[LATE] == 0 and changes[LATE + 1] > 500 * alone[LATE + 1] and difference > 1000 and alone[LATE] > 0.1
print("HOLDS: one new weight resets all the others" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
