#!/usr/bin/env bash
# Surprise: with a dynamic loss scale, DeepSpeed doubles the scale after every loss_scale_window good steps, before it divides
#   the gradients of the current step by it. So in each such step the gradients are half as large as they should be.
#   Gradient clipping hides it above the limit only. The reported norm of ZeRO 1 is the right one.
# Versions: deepspeed 0.19.8, torch 2.13.0. Date: 2026-11-28.
# Belief: gradients are divided by the scale with which their loss was multiplied, so every update below is 0.5.
# Source: Micikevicius et al. 2018, section 3.2, and the documentation of torch.amp.GradScaler, whose update() follows
#   step(); DeepSpeed's documentation of "loss_scale_window" (window over which to raise or lower the scale).
# Depends on: nothing of the machine. DeepSpeed refuses fp16 on CPUs without fp16 instructions; torch computes fp16 on
#   every CPU, so the program answers that question with yes.
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
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger

logger.setLevel(logging.ERROR)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # needs no C++ compiler
get_accelerator().is_fp16_supported = lambda: True
get_accelerator().supported_dtypes = lambda: [torch.float32, torch.float16]
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
WINDOW = 3


def updates(stage):
    """Return the loss scale before each of eight steps, and each step's update of a weight with gradient 0.5."""
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    config = {
        "train_batch_size": 1,
        "fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": WINDOW},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    scales = []
    moves = []
    for _ in range(8):
        scales.append(engine.optimizer.loss_scale)
        before = engine.module.weight[0, 0].item()
        engine.backward(engine(torch.full((1, 4), 0.5, dtype=torch.float16)).float().sum())
        engine.step()
        moves.append(before - engine.module.weight[0, 0].item())
    return scales, moves


print("torch", torch.__version__, "deepspeed", deepspeed.__version__)
holds = True
for stage in (1, 2):
    scales, moves = updates(stage)
    print(f"ZeRO {stage}: loss scales {scales}")
    print(f"ZeRO {stage}: updates     {moves}")
    grows = [later > scale for scale, later in zip(scales, scales[1:])]
    expected = [0.25 if growing else 0.5 for growing in grows]
    holds = holds and moves[:7] == expected and any(grows)
print("belief: 0.5 in every step; seen: 0.25 in each step in which the scale grows")
print("HOLDS: the step in which the scale grows has half the gradient" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
