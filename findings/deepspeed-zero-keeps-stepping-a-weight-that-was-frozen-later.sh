#!/usr/bin/env bash
# Surprise: under ZeRO 1 and 2, a weight that is frozen after `deepspeed.initialize` (`requires_grad_(False)`) keeps moving by the
#   optimizer's momentum, and a weight that is unfrozen later never moves. Without ZeRO, both do what the flag says. There is
#   no warning.
# Versions: deepspeed 0.19.8 (the newest release), torch 2.13.0. Date: 2026-11-30.
# Belief: a frozen weight stays as it is, and an unfrozen one is trained from then on, as in gradual unfreezing. Source: torch's
#   notes on autograd (setting requires_grad freezes a part of a model); DeepSpeed's documentation names no exception.
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


def movement(stage, learns_first):
    """Train two steps, freeze (or unfreeze) the first layer, train two more; return how far it moved in these two."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    first = model[0].weight
    first.requires_grad_(learns_first)
    config = {
        "train_batch_size": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    def train():
        for _ in range(2):
            engine.backward(engine(INPUT).sum())
            engine.step()

    train()
    first.requires_grad_(not learns_first)
    before = first.detach().clone()
    train()
    return (first.detach() - before).abs().max().item()


print("torch", torch.__version__, "deepspeed", deepspeed.__version__)
moved = {}
for stage in (0, 1, 2):
    for learns_first in (True, False):
        moved[stage, learns_first] = movement(stage, learns_first)
        what = "frozen" if learns_first else "unfrozen"
        print(f"ZeRO {stage}: a weight that was {what} after two steps moved by {moved[stage, learns_first]:.4f}")
print("belief: a frozen weight stays and an unfrozen one learns; seen: the opposite with ZeRO 1 and 2")
as_torch = moved[0, True] == 0 and moved[0, False] > 0.1
opposite = all(moved[stage, True] > 0.1 and moved[stage, False] == 0 for stage in (1, 2))
print("HOLDS: ZeRO steps the weights that were trainable at the start" if as_torch and opposite else "no longer so")
sys.exit(not (as_torch and opposite))
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
