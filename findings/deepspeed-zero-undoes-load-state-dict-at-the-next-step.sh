#!/usr/bin/env bash
# Surprise: under ZeRO 1 and 2, also in fp32, `engine.module.load_state_dict` between two steps works until the next step, which
#   puts the old weights back, even with a learning rate of 0. Without ZeRO, the loaded weights stay. There is no warning.
# Versions: deepspeed 0.19.8 (the newest release), torch 2.13.0. Date: 2026-11-30.
# Belief: the loaded weights stay until a step changes them. Source: torch's documentation of load_state_dict (copies parameters
#   into the module); ZeRO 1 and 2 shard optimizer states and gradients, and every replica keeps whole weights.
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


def weight_after(stage):
    """Load a state dict of ones into a model of zeros between two steps of lr 0; return the weight after the second."""
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    config = {
        "train_batch_size": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    def step():
        engine.backward(engine(INPUT).sum())
        engine.step()

    step()
    engine.module.load_state_dict({"weight": torch.ones(1, 4)})
    loaded = engine(INPUT).item() / 4
    step()
    return loaded, engine(INPUT).item() / 4


print("torch", torch.__version__, "deepspeed", deepspeed.__version__)
seen = {stage: weight_after(stage) for stage in (0, 1, 2)}
for stage, (loaded, stepped) in seen.items():
    print(f"ZeRO {stage}: weight {loaded} after load_state_dict, {stepped} after a step with learning rate 0")
print("belief: the loaded weight, 1, in all stages; seen: ZeRO 1 and 2 go back to the old weight, 0")
holds = seen == {0: (1.0, 1.0), 1: (1.0, 0.0), 2: (1.0, 0.0)}
print("HOLDS: the next step undoes load_state_dict" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
