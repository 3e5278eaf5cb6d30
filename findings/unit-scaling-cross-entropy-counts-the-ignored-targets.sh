#!/usr/bin/env bash
# Surprise: the cross-entropy of unit-scaling divides the sum of the losses by all rows, those with ignore_index included. With three
#   quarters of the targets ignored, the loss is 1.85 instead of 7.38 and the perplexity 6.3 instead of 1,603. 128 tokens alone have a
#   loss of 7.54, and the same tokens with pads up to 1,024 one of 0.94. Gradients are those of the sum, so training does not show it.
#   Validation losses of padded batches, prompts without a loss and masked language models are too small by the share of the ignored.
# Versions: unit-scaling 0.3.5 (the newest release), torch 2.13.0, numpy 2.4.6. Date: 2026-11-30.
# Belief: the value of the loss is torch's, and unit scaling changes the gradients only; the mean is one over the kept targets.
# Source: the docstring of unit_scaling.functional.cross_entropy, which is made from torch's: the loss is averaged over non-ignored
#   targets. It marks the arguments that are not supported, and ignore_index is not among them.
# Cause: cross_entropy in unit_scaling/functional.py calls torch's with reduction="sum" and scales it by one over the batch size.
# Checked: no issue of graphcore-research/unit-scaling about it was found.
# Depends on: nothing of the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 unit-scaling==0.3.5 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import sys
from importlib.metadata import version

import torch
import torch.nn.functional as F
import unit_scaling.functional as U

torch.set_num_threads(1)
TOKENS, VOCABULARY = 1024, 256
torch.manual_seed(0)
logits = 2 * torch.randn(TOKENS, VOCABULARY, dtype=torch.float64)
targets = torch.randint(0, VOCABULARY, (TOKENS,))


def gradient(loss_function, targets):
    """Return the gradient of the logits."""
    inputs = logits.clone().requires_grad_()
    loss_function(inputs, targets).backward()
    return inputs.grad


print("unit-scaling", version("unit-scaling"), "torch", torch.__version__)
documented = "the loss is averaged over non-ignored targets" in " ".join(U.cross_entropy.__doc__.split())
print("the docstring of unit_scaling.functional.cross_entropy says that the loss is averaged over non-ignored targets:", documented)
rows = []
for ignored in (0, 256, 512, 768, 1000):
    some = targets.clone()
    some[:ignored] = -100
    right, seen = F.cross_entropy(logits, some).item(), U.cross_entropy(logits, some).item()
    kept = gradient(U.cross_entropy, some)[ignored:]
    same = torch.allclose(kept, gradient(U.cross_entropy, targets)[ignored:])
    rows.append((right, seen, seen / right, 1 - ignored / TOKENS, same))
    print(f"{ignored:4} of {TOKENS} targets ignored: loss {seen:.3f} instead of {right:.3f}, perplexity {torch.tensor(seen).exp():.1f} "
          f"instead of {torch.tensor(right).exp():.1f}; gradients of the other rows as without ignored ones: {same}")
# Two batches of the same model: one full, one with a short document and pads.
padded = targets.clone()
padded[128:] = -100
apart = U.cross_entropy(logits[:128], targets[:128]).item(), U.cross_entropy(logits, padded).item()
print(f"128 tokens alone: {apart[0]:.3f}; the same 128 tokens with 896 pads: {apart[1]:.3f}")
print("belief: ignored targets and pads do not change the mean loss")
holds = documented and all(abs(ratio - share) < 1e-6 and same for _, _, ratio, share, same in rows)
holds = holds and abs(apart[1] / apart[0] - 0.125) < 1e-6
print("HOLDS: the mean of unit-scaling's cross-entropy divides by the ignored targets too" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
