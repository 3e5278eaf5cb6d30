#!/usr/bin/env bash
# Surprise: torch.distributed.pipelining scales gradients at the end of each schedule.step(), and it scales
#   all of weight.grad, also what earlier calls have left there. Two calls before one optimizer step (gradient
#   accumulation over several batches) therefore give g2 + g1 / n with n microbatches, not g1 + g2: the first batch
#   nearly vanishes. With scale_grads=False, the sum is right, but n times too large.
# Versions: torch 2.13.0. Date: 2026-11-28.
# Belief: step() adds the gradient of its batch to weight.grad, as backward() does, so two calls with the same batch
#   double it. Source: PyTorch's pages on torch.distributed.pipelining (step() runs a batch with automatic
#   microbatching) and on torch.autograd.backward (gradients accumulate in the leaves).
# Depends on: nothing of the machine; one process with one stage is enough.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
MICROBATCHES = 4
generator = torch.Generator().manual_seed(0)
inputs = torch.randn(8, 4, generator=generator)
targets = torch.randn(8, 4, generator=generator)
model = nn.Linear(4, 4, bias=False)
loss_fn = nn.MSELoss()


def accumulated(schedule_class, calls, scale_grads=True):
    """Return weight.grad after some calls of step(), in units of the gradient of one batch."""
    (expected,) = torch.autograd.grad(loss_fn(model(inputs), targets), model.weight)
    model.weight.grad = None
    stage = PipelineStage(model, 0, 1, torch.device("cpu"))
    schedule = schedule_class(stage, MICROBATCHES, loss_fn=loss_fn, scale_grads=scale_grads)
    for _ in range(calls):
        schedule.step(inputs, target=targets)
    return round((model.weight.grad / expected).mean().item(), 4)


print("torch", torch.__version__)
seen = {}
for schedule_class in (ScheduleGPipe, Schedule1F1B):
    for calls in (1, 2, 3):
        ratio = accumulated(schedule_class, calls)
        seen[schedule_class, calls] = ratio
        print(f"{schedule_class.__name__}, {calls} calls of step() with the same batch: {ratio} times its gradient")
unscaled = accumulated(ScheduleGPipe, 2, scale_grads=False)
print(f"ScheduleGPipe, 2 calls with scale_grads=False: {unscaled} times its gradient")
print(f"belief: 1, 2, 3; seen with {MICROBATCHES} microbatches: 1, 1 + 1/4, 1 + 1/4 + 1/16")
holds = unscaled == 2 * MICROBATCHES
for schedule_class in (ScheduleGPipe, Schedule1F1B):
    ratios = [seen[schedule_class, calls] for calls in (1, 2, 3)]
    holds = holds and ratios == [1.0, 1.25, 1.3125]
print("HOLDS: two calls of step() give 1.25 times the gradient" if holds else "no longer so")
dist.destroy_process_group()
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
