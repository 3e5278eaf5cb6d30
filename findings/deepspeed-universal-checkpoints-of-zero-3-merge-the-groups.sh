#!/usr/bin/env bash
# Surprise: an engine with ZeRO 3 that loads a universal checkpoint gives all parameter groups the settings of the first
#   group. So weight decay now applies to biases and norms, and learning rates by layer become one, without a message.
#   ZeRO 1 keeps the settings of each group.
# Versions: deepspeed 0.19.8 (the newest release), torch 2.13.0. Date: 2026-11-28.
# Belief: each group has the settings of the saved group. Source: DeepSpeed's page on universal checkpointing, which
#   promises that training continues with another number of GPUs or another layout.
# Depends on: nothing of the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 deepspeed==0.19.8 numpy==2.4.6 setuptools==80.9.0
cat > "$work/program.py" <<'PY'
import logging
import os
import subprocess
import sys

os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK="0")
import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import logger

logger.setLevel(logging.ERROR)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # needs no C++ compiler
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def engine_with(stage, load_universal):
    """Return an engine with two groups: the matrix with rate 0.01 and decay 0.1, the bias with 0.001 and without decay."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    groups = [
        {"params": [model.weight], "lr": 0.01, "weight_decay": 0.1},
        {"params": [model.bias], "lr": 0.001, "weight_decay": 0.0},
    ]
    config = {
        "train_batch_size": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "checkpoint": {"load_universal": load_universal},
    }
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups), config=config)[0]


def settings(engine):
    """Return the learning rate and the weight decay of each group."""
    return [(group["lr"], group["weight_decay"]) for group in engine.optimizer.param_groups]


def saved_and_loaded(stage):
    """Save after one step, convert and load; return the settings of the groups before the save and after the load."""
    first = engine_with(stage, False)
    first.backward(first(torch.ones(1, 4)).sum())
    first.step()
    folder = f"stage{stage}"
    first.save_checkpoint(folder, tag="saved")
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", f"{folder}/saved", "--output_folder", f"{folder}/universal"]
    subprocess.run(command, check=True, capture_output=True)
    second = engine_with(stage, True)
    second.load_checkpoint(folder, tag="universal")
    return settings(first), settings(second)


print("torch", torch.__version__, "deepspeed", deepspeed.__version__)
seen = {stage: saved_and_loaded(stage) for stage in (1, 3)}
for stage, (before, after) in seen.items():
    print(f"ZeRO {stage}: (learning rate, weight decay) of the groups when saved {before}, when loaded {after}")
print("belief: equal; seen: with ZeRO 3 the second group gets the settings of the first")
holds = seen[1][0] == seen[1][1] == seen[3][0] and seen[3][1] == [(0.01, 0.1)] * 2
print("HOLDS: the bias now decays, and its learning rate is ten times as large" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
