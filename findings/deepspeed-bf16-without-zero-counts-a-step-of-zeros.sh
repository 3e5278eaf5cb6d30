#!/usr/bin/env bash
# Surprise: in bf16 without ZeRO, DeepSpeed calls the optimizer once with zero gradients before training. Adam counts
#   this call as step 1, so its bias corrections are those of the next step. With the usual betas, the first real
#   update is 0.744 times as large as it should be, the second 0.856, and the fifth is still 0.95.
#   ZeRO 1 with the same settings takes the full step.
# Versions: deepspeed 0.19.8, torch 2.13.0. Date: 2026-11-28.
# Belief: the first update of Adam has the size of the learning rate, and a ZeRO stage does not change updates.
# Source: Kingma and Ba 2015, section 2 (bias correction bounds the first step by the rate); DeepSpeed's documentation of
#   ZeRO (partitions the states of the optimizer) and of "bf16" (names no extra step).
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
RATE = 0.125


def updates(stage):
    """Return the largest change of a weight in each of five steps, in units of the learning rate."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.zeros_(model.weight)
    config = {
        "train_batch_size": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    inputs = torch.ones(1, 4, dtype=torch.bfloat16)
    moves = []
    for _ in range(5):
        before = engine.module.weight.detach().float().clone()
        engine.backward(engine(inputs).float().sum())  # the gradient of every weight is 1 in every step
        engine.step()
        after = engine.module.weight.detach().float()
        moves.append(round((after - before).abs().max().item() / RATE, 3))
    return moves


print("torch", torch.__version__, "deepspeed", deepspeed.__version__)
without_zero = updates(0)
with_zero = updates(1)
print("updates in units of the learning rate, ZeRO 0:", without_zero)
print("updates in units of the learning rate, ZeRO 1:", with_zero)
print("belief: 1 in every step of both; seen: about 0.75 in the first step of ZeRO 0")
holds = 0.72 < without_zero[0] < 0.78
holds = holds and without_zero[1] < 0.9
holds = holds and all(0.98 < move < 1.02 for move in with_zero)
print("HOLDS: the first update without ZeRO is", without_zero[0] if holds else "no longer short")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
