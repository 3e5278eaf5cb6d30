#!/usr/bin/env bash
# Surprise: with DeepSpeed's Muon under ZeRO 1 and 2, gradient_clipping scales the update that Newton-Schulz has already
#   orthogonalised. The norm of this update depends on the shapes and the number of matrices, and hardly on the gradient. So
#   gradient_clipping 1.0 gives every step of every run the total length lr, also if the true gradient is far below the
#   limit. A model of 16 layers moves each matrix by half as much as a model of 4 layers. The reported gradient norm
#   is a constant of the model. Under ZeRO 0, clipping has no such effect, and each matrix moves by the same in both models.
# Versions: deepspeed 0.19.8 (the newest release), torch 2.13.0. Date: 2026-11-28.
# Belief: clipping bounds the norm of the gradient before the optimizer sees it. Muon does not depend on the scale of the
#   gradient, so clipping changes nothing, and the ZeRO stage changes memory only.
# Source: DeepSpeed's documentation of gradient_clipping and of ZeRO; Jordan et al. 2024 on Muon.
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
LR = 0.01
WIDTH = 24


def first_update(stage, layers, clipping, factor):
    """Return the norms of one matrix's update and of all updates together, and the gradient norm that DeepSpeed reports."""
    torch.manual_seed(11)
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    for weight in model.parameters():
        torch.nn.init.orthogonal_(weight)
    before = [weight.detach().clone() for weight in model.parameters()]
    config = {
        "train_batch_size": 64,
        "gradient_clipping": clipping,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Muon", "params": {"lr": LR, "weight_decay": 0.0}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    rows = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(12))
    target = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(13))
    engine.backward(factor * (engine(rows) - target).square().mean())
    engine.step()
    moves = [(weight.detach() - old).norm() for weight, old in zip(model.parameters(), before)]
    reported = engine.get_global_grad_norm()
    reported = None if reported is None else round(float(reported), 2)
    return moves[0].item(), torch.stack(moves).norm().item(), reported


print("torch", torch.__version__, "deepspeed", deepspeed.__version__)
first = {}
total = {}
for stage in (0, 1, 2):
    for layers in (4, 16):
        for clipping, factor in ((0.0, 1.0), (1.0, 1.0), (1.0, 0.1), (1.0, 10.0)):
            key = stage, layers, clipping, factor
            first[key], total[key], reported = first_update(*key)
            print(f"ZeRO {stage}, {layers:2d} layers, gradient_clipping {clipping}, loss x {factor:4}: one matrix moves by "
                  f"{first[key] / LR:.2f} lr, all by {total[key] / LR:.2f} lr, reported gradient norm {reported}")
print("belief: one matrix moves alike in every row; seen: with clipping, ZeRO 1 and 2 move all matrices together by 1.00 lr")
holds = True
for factor in (1.0, 0.1, 10.0):
    for layers in (4, 16):
        holds = holds and abs(first[0, layers, 1.0, factor] / first[0, layers, 0.0, 1.0] - 1) < 0.05
        for stage in (1, 2):
            holds = holds and abs(total[stage, layers, 1.0, factor] / LR - 1) < 0.01
    for stage in (1, 2):
        ratio = first[stage, 4, 1.0, factor] / first[stage, 16, 1.0, factor]
        holds = holds and 1.8 < ratio < 2.2
print("HOLDS: clipping makes the length of the whole step lr, whatever the gradient" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
