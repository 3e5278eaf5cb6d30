#!/usr/bin/env bash
# Surprise: in fp16 without ZeRO, engine.backward() does not multiply the loss by the loss scale, but engine.step()
#   divides the gradients by it. So a loss scale of 16 trains with a sixteenth of every gradient, and the usual initial
#   scale of 65536 with almost none. Losses are finite, no step is skipped, and the reported gradient norm is the right
#   one. Adam hides most of it. ZeRO 1 with the same settings is right.
# Versions: deepspeed 0.19.8 (0.18.3 and later), torch 2.13.0. Date: 2026-11-28.
# Belief: a loss scale changes rounding only; SGD moves by the rate times the gradient, whatever the scale.
# Source: Micikevicius et al. 2018, section 3.2 (gradients are unscaled by the factor that multiplied the loss);
#   DeepSpeed's documentation of "fp16": {"loss_scale": ...}.
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


def first_update(stage, scale):
    """Return the update of a weight whose gradient is 1 by SGD with rate 1, and the reported gradient norm."""
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    config = {
        "train_batch_size": 1,
        "fp16": {"enabled": True, "loss_scale": scale},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(torch.ones(1, 4, dtype=torch.float16)).float().sum())
    engine.step()
    return -engine.module.weight[0, 0].item(), float(engine.get_global_grad_norm())


print("torch", torch.__version__, "deepspeed", deepspeed.__version__)
seen = {}
for stage in (0, 1):
    for scale in (1.0, 16.0, 1024.0):
        seen[stage, scale], norm = first_update(stage, scale)
        print(f"ZeRO {stage}, loss scale {scale:6g}: update {seen[stage, scale]:.6f}, reported gradient norm {norm:.3f}")
print("belief: the update is 1 in every row; seen: without ZeRO it is 1 / loss scale")
holds = all(abs(seen[1, scale] - 1) < 0.01 for scale in (1.0, 16.0, 1024.0))
holds = holds and all(abs(seen[0, scale] * scale - 1) < 0.01 for scale in (1.0, 16.0, 1024.0))
print("HOLDS: without ZeRO, gradients are divided by a scale that was not applied" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
