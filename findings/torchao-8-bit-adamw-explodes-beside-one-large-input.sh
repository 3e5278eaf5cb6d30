#!/usr/bin/env bash
# Surprise: torchao's AdamW8bit and AdamWFp8 take steps of thousands of learning rates for weights that share a block of 256 with a
#   weight whose gradients are 1,000 times as large. One input feature of 256 that is 1,000 times the others (a massive activation) is
#   enough: the loss of a linear model rises beyond 100,000, while torch's AdamW with the same settings reaches 1.07. With FP8 states
#   a factor of 300 is enough. Up to a factor of 100, AdamW8bit gives torch's losses. Nothing is reported.
# Versions: torchao 0.18.0 (the newest release), torch 2.13.0, numpy 2.4.6. Date: 2026-11-30.
# Belief: an 8-bit AdamW is AdamW with a few percent of noise in its states; a step is about one learning rate at most, whatever the
#   scale of a gradient, and block-wise scales keep the damage of an outlier small.
# Source: torchao's page on low-bit optimizers and the paper on 8-bit optimizers (arXiv 2110.02861), by which the states are stored;
#   the paper reports the quality of 32-bit states without a change of the settings.
# Cause: the second moment is the square of the gradient, so a ratio of 1/1,000 is one of 1e-6 there, and less whenever a gradient is
#   small by chance. The smallest code above zero is 3e-7 of the largest value of the block (8 bits) or 4e-6 (E4M3). What is stored as
#   zero is a zero in the next step, where the denominator holds 0.1 % of one squared gradient, or eps if that gradient is small. The
#   first moment is not squared and survives. (OptimState8bit and OptimStateFp8 in torchao/optim.)
# Checked: pytorch/ao pull requests 463 and 927 (the states, and blocks of 256 instead of 2,048); pytorch/torchtitan issue 742 (somebody
#   sees torchao's 8-bit Adam diverge; no cause is given); unslothai/unsloth-zoo pull request 962 (the like with uniform codes in
#   another package, whose author expects a dynamic map to mend it). No issue of pytorch/ao about it was found.
#   bitsandbytes 0.50.2 on a CPU errs the other way: with constant gradients its steps are a quarter of a learning rate at a ratio of
#   1/1,000 and a fiftieth at 1/10,000.
# Depends on: nothing of the machine. torch.compile uses its eager backend here, since inductor needs a compiler; AdamW8bit compiled
#   by inductor diverges alike.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 torchao==0.18.0 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import functools
import logging
import sys
from importlib.metadata import version

import torch

logging.disable(logging.WARNING)
backend = sys.argv[1] if len(sys.argv) > 1 else "eager"
torch.compile = functools.partial(torch.compile, backend=backend)
from torchao.optim import AdamW8bit, AdamWFp8

torch.set_num_threads(1)
LR, STEPS, INPUTS, OUTPUTS = 1e-3, 1000, 256, 16


def train(optimizer_class, factor):
    """Train a linear model whose first input is factor times as large as the others; return its last loss and its largest step.

    The target has noise of variance 1, which is the smallest loss. The largest step is in learning rates, without the first input.
    """
    torch.manual_seed(0)
    target = torch.randn(OUTPUTS, INPUTS) / 16
    target[:, 0] /= factor
    weight = torch.nn.Parameter(torch.zeros(OUTPUTS, INPUTS))
    optimizer = optimizer_class([weight], lr=LR, weight_decay=0.0)
    losses, largest = [], 0.0
    for _ in range(STEPS):
        inputs = torch.randn(64, INPUTS)
        inputs[:, 0] *= factor
        outputs = inputs @ target.T + torch.randn(64, OUTPUTS)
        optimizer.zero_grad()
        loss = ((inputs @ weight.T - outputs) ** 2).mean()
        loss.backward()
        before = weight.detach().clone()
        optimizer.step()
        largest = max(largest, (weight.detach() - before)[:, 1:].abs().max().item() / LR)
        losses.append(loss.item())
    return sum(losses[-50:]) / 50, largest


print("torchao", version("torchao"), "torch", torch.__version__)
print(f"belief: all three optimizers end with a loss near 1, and no step is much longer than a learning rate of {LR}")
seen = {}
for factor in (1, 30, 100, 300, 1000):
    for optimizer_class in (torch.optim.AdamW, AdamW8bit, AdamWFp8):
        name = optimizer_class.__name__
        seen[name, factor] = loss, largest = train(optimizer_class, factor)
        print(f"first input {factor:4} times the others, {name:9}: loss {loss:12.3f}, largest step of another weight {largest:12.1f} lr")
holds = all(seen["AdamW", factor][0] < 1.1 and seen["AdamW", factor][1] < 2 for factor in (1, 30, 100, 300, 1000))
holds = holds and all(abs(seen["AdamW8bit", factor][0] - seen["AdamW", factor][0]) < 0.02 for factor in (1, 30, 100))
holds = holds and seen["AdamW8bit", 1000][0] > 100 and seen["AdamW8bit", 1000][1] > 1000
holds = holds and seen["AdamWFp8", 300][0] > 100 and seen["AdamWFp8", 1000][0] > 100
print("HOLDS: a weight with a large gradient makes the others of its block explode in torchao's AdamW8bit and AdamWFp8" if holds
      else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
