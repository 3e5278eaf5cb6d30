#!/usr/bin/env bash
# Surprise: on a CPU, Adam, AdamW, SGD and Adagrad with fused=True update the wrong elements if the weight is a part of a larger tensor and
#   has gaps in memory, such as some columns of it. After three steps, 20 of the 24 elements of the weight are wrong, and 12 elements
#   of the larger tensor outside the weight have changed. With foreach=True or foreach=False instead of fused=True, the weight is
#   right and the other elements stay as they are. There is no message.
# Versions: torch 2.13.0 on a CPU (2.15.0 does the same). Date: 2026-11-30.
# Belief: fused=True computes the same update, only faster.
# Source: the documentation of torch.optim (for-loop, foreach and fused are implementations of the same algorithm, of which fused is
#   the fastest).
# Cause: the kernels in aten/src/ATen/native/cpu/FusedAdamKernel.cpp (and its siblings) read and write numel consecutive elements from the
#   first one on, without regard to strides. The gradient of such a weight is dense, so its elements are even applied to others than
#   their own.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import sys

import torch

COLUMNS = slice(2, 6)
OPTIMIZERS = {
    "Adam": (torch.optim.Adam, {}),
    "AdamW": (torch.optim.AdamW, {}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {}),
}


def trained(kind, settings, contiguous=False, **implementation):
    """Return the weight after three steps, and how many elements beside it have changed."""
    table = torch.arange(48.0).view(6, 8).sin()
    before = table.clone()
    columns = table[:, COLUMNS]
    weight = torch.nn.Parameter(columns.contiguous() if contiguous else columns)
    optimizer = kind([weight], lr=0.1, **settings, **implementation)
    for _ in range(3):
        optimizer.zero_grad()
        (weight - 1).square().sum().backward()
        optimizer.step()
    changed = table != before
    changed[:, COLUMNS] = False
    return weight.detach().clone(), int(changed.sum())


print("torch", torch.__version__)
print("belief: fused=True gives the weight that the other implementations give")
holds = True
for name, (kind, settings) in OPTIMIZERS.items():
    right, _ = trained(kind, settings, contiguous=True, fused=False, foreach=False)
    for implementation in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        weight, beside = trained(kind, settings, **implementation)
        wrong = int(((weight - right).abs() > 1e-5).sum())
        print(f"{name} with {implementation}: {wrong} of {weight.numel()} elements wrong, {beside} elements beside the weight changed")
        holds = holds and ((wrong, beside) == (20, 12) if "fused" in implementation else (wrong, beside) == (0, 0))
    dense, _ = trained(kind, settings, contiguous=True, fused=True)
    holds = holds and torch.allclose(dense, right, atol=1e-5)
print("fused=True with a contiguous copy of the columns: right for all four")
print("HOLDS: fused optimizers step other elements than those of a weight with gaps" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
