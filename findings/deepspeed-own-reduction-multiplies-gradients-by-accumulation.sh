#!/usr/bin/env bash
# Surprise: a loop that reduces gradients itself, and therefore turns off DeepSpeed's own all-reduce
#   (engine.enable_backward_allreduce = False), gets gradients that are gradient_accumulation_steps times too large:
#   engine.backward() divides the loss by that number only if it also reduces. There is no message, and Adam
#   hides the factor. DeepSpeed 0.18.3 divides in both cases, so an upgrade changes the learning rate of such a loop.
# Versions: deepspeed 0.18.2 (0.17.0 the same) and 0.18.3, torch 2.13.0. Date: 2026-11-28.
# Belief: backward() divides by the accumulation steps, and the switch concerns communication only.
# Source: DeepSpeed's documentation of gradient_accumulation_steps (gradients are averaged over that many steps), and
#   the attribute's name.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 setuptools==80.9.0
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


def update(accumulation, reduce):
    """Return the update of SGD with rate 1 for a weight whose mean gradient is 1."""
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.enable_backward_allreduce = reduce
    for _ in range(accumulation):
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
    return -model.weight[0, 0].item()


print("torch", torch.__version__, "deepspeed", deepspeed.__version__)
grows = deepspeed.__version__ == "0.18.2"
holds = True
for accumulation in (1, 2, 4):
    reduced = update(accumulation, True)
    own = update(accumulation, False)
    print(f"{accumulation} accumulation steps: update {reduced:g} with DeepSpeed's all-reduce, {own:g} without it")
    expected = accumulation if grows else 1
    holds = holds and reduced == 1 and own == expected
print("belief: 1 in both columns")
print("HOLDS: as described for this release" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
for release in 0.18.2 0.18.3; do
    "$work/venv/bin/pip" install --quiet "deepspeed==$release"
    OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
done
