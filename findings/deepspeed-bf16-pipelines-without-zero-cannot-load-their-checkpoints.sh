#!/usr/bin/env bash
# Surprise: a DeepSpeed pipeline in bf16 without ZeRO saves checkpoints that it cannot load. save_checkpoint succeeds and
#   writes the optimizer's state into files like those of ZeRO; load_checkpoint looks for it in the files of a run without
#   ZeRO, and ends in "KeyError: 0". The run trains for days and cannot be resumed. fp32, and bf16 with ZeRO 1, resume
#   with the very next step.
# Versions: deepspeed 0.19.8, torch 2.13.0. Date: 2026-11-30.
# Belief: an engine loads what the same engine has saved. bf16 without ZeRO is a documented setting of pipelines, whose
#   optimizer (BF16_Optimizer) DeepSpeed chooses itself.
# Source: DeepSpeed's documentation of model checkpointing (save_checkpoint and load_checkpoint of one engine) and of
#   "bf16"; deepspeed/runtime/engine.py loads states of the optimizer by files of ZeRO only if ZeRO is on.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 deepspeed==0.19.8 numpy==2.4.6 setuptools==80.9.0
cat > "$work/program.py" <<'PY'
import logging
import os
import sys
import tempfile

os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK="0")
import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.utils import logger
from torch import nn

logger.setLevel(logging.ERROR)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # needs no C++ compiler
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)


def resumes(bf16, stage):
    """Return whether an engine loads its own checkpoint and repeats the step that followed the save."""
    torch.manual_seed(0)
    net = PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=1, loss_fn=nn.functional.mse_loss)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.125)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    dtype = torch.bfloat16 if bf16 else torch.float32
    batch = (torch.ones(2, 4, dtype=dtype), torch.zeros(2, 4, dtype=dtype))
    engine.train_batch(iter([batch]))
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder, "first")
        expected = engine.train_batch(iter([batch])).item()
        try:
            engine.load_checkpoint(folder, "first")
        except KeyError as error:
            return f"KeyError: {error}"
        found = engine.train_batch(iter([batch])).item()
    return "the same step" if found == expected else f"another step ({found} instead of {expected})"


print("torch", torch.__version__, "deepspeed", deepspeed.__version__)
results = []
for bf16, stage in ((False, 0), (True, 1), (True, 0)):
    results.append(resumes(bf16, stage))
    print("bf16" if bf16 else "fp32", "ZeRO", stage, "after the load:", results[-1])
print("belief: the same step in all three; seen: no load in bf16 without ZeRO")
holds = results == ["the same step", "the same step", "KeyError: 0"]
print("HOLDS: bf16 without ZeRO saves what it cannot load" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py 2>"$work/errors" | grep -E "^(torch|fp32|bf16|belief|HOLDS|no longer)"
