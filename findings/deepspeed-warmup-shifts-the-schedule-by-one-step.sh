#!/usr/bin/env bash
# Surprise: DeepSpeed's warm-up schedules give the first two optimizer steps the same learning rate, the minimum. With the
#   default minimum of 0, the first two steps change no weight. The rest of the schedule comes one step late: a run of
#   exactly total_num_steps steps ends one step before the end of its decay. OneCycle of the same module has no such shift.
# Versions: deepspeed 0.19.8 (the newest release), torch 2.13.0. Date: 2026-11-28.
# Belief: WarmupLR from 0 to 1 in 4 steps gives 0, 0.25, 0.5, 0.75, 1. WarmupDecayLR falls to 0.25 in step 8 of 8.
# Source: the docstring of WarmupLR (increases the rate from the minimum to the maximum over warmup_num_steps steps), and
#   the schedulers of torch.optim.lr_scheduler, whose constructor takes the first step.
# Depends on: nothing of the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 deepspeed==0.19.8 numpy==2.4.6 setuptools==80.9.0
cat > "$work/program.py" <<'PY'
import logging
import os
import sys

os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK="0")
import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import logger

logger.setLevel(logging.ERROR)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # needs no C++ compiler
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
STEPS = 8


def updates(scheduler, **parameters):
    """Return the update in each step of plain SGD on a weight with gradient 1, which is the learning rate in use."""
    model = torch.nn.Linear(1, 1, bias=False)
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "scheduler": {"type": scheduler, "params": parameters},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    moves = []
    for _ in range(STEPS):
        before = model.weight.item()
        engine.backward(engine(torch.ones(1, 1)).sum())
        engine.step()
        moves.append(round(before - model.weight.item(), 3))
    return moves


print("torch", torch.__version__, "deepspeed", deepspeed.__version__)
linear = {"warmup_num_steps": 4, "warmup_type": "linear"}
warmup = updates("WarmupLR", warmup_min_lr=0.0, warmup_max_lr=1.0, **linear)
print("WarmupLR, 0 to 1 in 4 steps:                ", warmup)
half = updates("WarmupLR", warmup_min_lr=0.5, warmup_max_lr=1.0, **linear)
print("WarmupLR, 0.5 to 1 in 4 steps:              ", half)
decay = updates("WarmupDecayLR", total_num_steps=STEPS, warmup_min_lr=0.0, warmup_max_lr=1.0, **linear)
print("WarmupDecayLR, the same, then to 0 by step 8:", decay)
cosine = updates("WarmupCosineLR", total_num_steps=STEPS, **linear)
print("WarmupCosineLR, the same, with a cosine:     ", cosine)
cycle = updates("OneCycle", cycle_min_lr=0.0, cycle_max_lr=1.0, cycle_first_step_size=4)
print("OneCycle, 0 to 1 in 4 steps and back:        ", cycle)
print("belief: 0, 0.25, 0.5, 0.75, 1 and then the decay; seen: 0, 0, 0.25, 0.5, 0.75, except for OneCycle")
holds = half[:4] == [0.5, 0.5, 0.625, 0.75]
for moves in (warmup, decay, cosine):
    holds = holds and moves[:5] == [0.0, 0.0, 0.25, 0.5, 0.75]
holds = holds and decay[5:] == [1.0, 0.75, 0.5]
holds = holds and cycle[:5] == [0.0, 0.25, 0.5, 0.75, 1.0]
print("HOLDS: two steps at a rate of 0, and a decay that ends at 0.5 instead of 0.25" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
