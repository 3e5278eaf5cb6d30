#!/usr/bin/env bash
# Surprise: torchmetrics' Perplexity of fp16 logits is infinite as soon as one token has a probability below 3e-8 (a loss above 17.4), such
#   as a typo or a token of another language. For 4,096 tokens with a perplexity of 9.97, one such token should make it 10.00. The
#   metric returns inf, and it stays inf for all later batches until reset(). In fp32 and bf16, the same happens above a loss of about
#   100: in fp32, a logit of one target that is lowered by 120 gives inf instead of 10.26. F.cross_entropy of the same logits is right
#   each time. There is no message.
# Versions: torchmetrics 1.9.0 (the newest release), torch 2.13.0, numpy 2.4.6. Date: 2026-11-30.
# Belief: the metric is exp(cross-entropy) of the logits within the precision of their type.
# Source: the documentation of torchmetrics.text.Perplexity (preds: logits or an unnormalized score; the perplexity is the exponential of
#   the mean negative log-likelihood). torchmetrics accepts fp16 since its issue 2224, which asked for it.
# Cause: _perplexity_update in torchmetrics/functional/text/perplexity.py takes the softmax in the type of the logits and then the
#   logarithm, instead of log_softmax, so a probability that is rounded to zero has an infinite loss.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 torchmetrics==1.9.0 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import math
import sys

import torch
import torch.nn.functional as F
import torchmetrics
from torchmetrics.text import Perplexity

BATCHES, LENGTH, VOCABULARY = 8, 512, 1000
torch.manual_seed(0)
logits = 4 * torch.randn(BATCHES, 1, LENGTH, VOCABULARY)
targets = torch.distributions.Categorical(logits=logits).sample()  # the tokens come from the model's own distribution
loss = -logits.log_softmax(-1)
rare = targets.clone()
rare[3, 0, 100] = (loss[3, 0, 100] - 18).abs().argmin()  # one token with a loss near 18
print("torchmetrics", torchmetrics.__version__, "torch", torch.__version__, "-", BATCHES * LENGTH, "tokens")
print(f"loss of the rare token: {loss[3, 0, 100, rare[3, 0, 100]].item():.2f}; the largest of the others: "
      f"{loss.gather(-1, targets[..., None]).max().item():.2f}")


def measure(values, tokens):
    """Return the metric, the exponential of the cross-entropy in the same type, and that in fp64 of the same values."""
    metric = Perplexity()
    for batch, target in zip(values, tokens):
        metric.update(batch, target)
    flat = values.flatten(0, 2)
    same = F.cross_entropy(flat, tokens.flatten(), reduction="none").double().mean().exp().item()
    return metric.compute().item(), same, F.cross_entropy(flat.double(), tokens.flatten()).exp().item()


seen = {}
for name, tokens in (("without the rare token", targets), ("with it", rare)):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        seen[name, dtype] = measure(logits.to(dtype), tokens)
        print(f"{name}, {dtype}: torchmetrics {seen[name, dtype][0]:.4g}, cross_entropy {seen[name, dtype][1]:.4g}, in fp64 {seen[name, dtype][2]:.4g}")
lowered = logits.clone()
lowered[3, 0, 100, targets[3, 0, 100]] -= 120
wild = measure(lowered, targets)
print(f"the logit of one target lowered by 120, fp32: torchmetrics {wild[0]:.4g}, cross_entropy {wild[1]:.4g}, in fp64 {wild[2]:.4g}")
first = next(tenth / 10 for tenth in range(10, 1500)
             if Perplexity()(torch.tensor([[[tenth / 10, 0.0]]]).half(), torch.tensor([[1]])).item() == math.inf)
print(f"fp16: the loss of one token is infinite from {first} on")
print("belief: with the rare token, the perplexity is higher by less than 1 % in each type")
holds = all(abs(seen["without the rare token", dtype][0] / seen["without the rare token", dtype][2] - 1) < 0.01
            for dtype in (torch.float32, torch.bfloat16, torch.float16))
holds = holds and seen["with it", torch.float16][0] == math.inf and abs(seen["with it", torch.float16][1] / seen["with it", torch.float16][2] - 1) < 0.01
holds = holds and seen["with it", torch.float16][2] < 1.01 * seen["without the rare token", torch.float16][2] and wild[0] == math.inf
holds = holds and abs(wild[1] / wild[2] - 1) < 0.01 and 17 < first < 18
print("HOLDS: one rare token makes the perplexity infinite in fp16" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
