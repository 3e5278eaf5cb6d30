#!/usr/bin/env bash
# Surprise: under ZeRO 3, `engine.load_checkpoint(folder, load_module_only=True)` loads no weight and returns the path of the
#   checkpoint as after a success. The model keeps its initial weights. With ZeRO 1 and 2 the same call loads them, and so
#   does `load_optimizer_states=False` in all stages.
# Versions: deepspeed 0.19.8 (the newest release), torch 2.13.0. Date: 2026-11-28.
# Belief: the model has the weights of the checkpoint. Source: the docstring of load_checkpoint (load_module_only: boolean to
#   load only the model weights from the checkpoint, e.g. for warmstarting; the returned path is None if loading failed).
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
INPUT = torch.ones(1, 4)


def engine_with(weight, stage):
    """Return an engine for a layer whose weights all have this value."""
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.constant_(model.weight, weight)
    config = {
        "train_batch_size": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def weight_after_load(stage, **how):
    """Save a model with weight 5 and load it into a model with weight 1; return the weight that this model has then."""
    first = engine_with(5.0, stage)
    first.backward(first(INPUT).sum())
    first.step()
    first.save_checkpoint("checkpoint", tag=f"stage{stage}")
    second = engine_with(1.0, stage)
    path, _ = second.load_checkpoint("checkpoint", tag=f"stage{stage}", **how)
    return second(INPUT).item() / 4, path is not None


print("torch", torch.__version__, "deepspeed", deepspeed.__version__)
seen = {}
for stage in (1, 2, 3):
    for how in ("load_optimizer_states", "load_module_only"):
        value = how == "load_module_only"
        seen[stage, how] = weight_after_load(stage, **{how: value})
        print(f"ZeRO {stage}, {how}={value}: weight {seen[stage, how][0]}, path returned: {seen[stage, how][1]}")
print("belief: the weight of the checkpoint, 5; seen: the initial weight, 1, with ZeRO 3 and load_module_only")
wrong = seen.pop((3, "load_module_only"))
holds = wrong == (1.0, True) and set(seen.values()) == {(5.0, True)}
print("HOLDS: ZeRO 3 loads nothing and reports a success" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
