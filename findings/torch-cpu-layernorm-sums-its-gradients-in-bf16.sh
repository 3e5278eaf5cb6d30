#!/usr/bin/env bash
# Surprise: on a CPU under bf16 autocast, LayerNorm accumulates the gradients of its weight and bias over the tokens in bf16,
#   although both parameters are fp32. A sum of ones stops at 256. With ordinary random gradients the error grows with
#   the number of tokens in a micro-batch: 6 % of the bias gradient at 4096 tokens and 40 % at 16384. RMSNorm and the bias
#   of a linear layer accumulate in fp32 and are right.
# Versions: torch 2.13.0. Releases 2.14.1 and 2.15.0 behave the same. Date: 2026-11-28.
# Belief: a reduction over many bf16 values is accumulated in fp32, above all if the result is an fp32 gradient.
# Source: Micikevicius et al. 2018, section 3.3 (large reductions, such as those of normalisation layers, in fp32).
# Depends on: the number of threads. Each thread has its own sum, so the sum of ones stops at 256 for each thread. The
#   program uses one thread.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import copy
import sys
import warnings

warnings.filterwarnings("ignore")
import torch
from torch import nn

torch.set_num_threads(1)
WIDTH = 256
LAYERS = {
    "LayerNorm": nn.LayerNorm(WIDTH),
    "RMSNorm": nn.RMSNorm(WIDTH),
    "Linear": nn.Linear(WIDTH, WIDTH),
}


def gradients(layer, rows, upstream):
    """Return the fp32 gradients of the layer's parameters under bf16 autocast, and the exact gradients in fp64."""
    mixed = copy.deepcopy(layer)
    with torch.autocast("cpu", torch.bfloat16):
        out = mixed(rows)
    out.backward(upstream.to(out.dtype))
    exact = copy.deepcopy(layer).double()
    exact(rows.double()).backward(upstream.double())
    return dict(mixed.named_parameters()), dict(exact.named_parameters())


print("torch", torch.__version__, "threads", torch.get_num_threads())
rows = torch.randn(5000, WIDTH, generator=torch.Generator().manual_seed(21)).to(torch.bfloat16)
sums = {}
for name in ("LayerNorm", "Linear"):
    mixed, exact = gradients(LAYERS[name], rows, torch.ones(5000, WIDTH, dtype=torch.bfloat16))
    sums[name] = mixed["bias"].grad[0].item()
    print(f"{name}: bias gradient over 5000 tokens with gradient 1: {sums[name]}, dtype {mixed['bias'].grad.dtype}")

errors = {}
for tokens in (1024, 4096, 16384):
    generator = torch.Generator().manual_seed(22)
    rows = torch.randn(tokens, WIDTH, generator=generator).to(torch.bfloat16)
    upstream = (torch.randn(tokens, WIDTH, generator=generator) + 0.1).to(torch.bfloat16)
    for name, layer in LAYERS.items():
        mixed, exact = gradients(layer, rows, upstream)
        for parameter in exact:
            difference = mixed[parameter].grad.double() - exact[parameter].grad
            error = (difference.norm() / exact[parameter].grad.norm()).item()
            errors[name, parameter, tokens] = error
            print(f"{tokens:5d} tokens, {name} {parameter}: relative error of the gradient {error:.4f}")
print("belief: 5000 for both biases and errors below 0.01 in every row")
holds = sums["LayerNorm"] == 256 and abs(sums["Linear"] - 5000) < 20
holds = holds and errors["LayerNorm", "bias", 4096] > 0.04 and errors["LayerNorm", "bias", 16384] > 0.3
holds = holds and errors["LayerNorm", "weight", 16384] > 0.1
for tokens in (1024, 4096, 16384):
    holds = holds and errors["RMSNorm", "weight", tokens] < 0.01 and errors["Linear", "bias", tokens] < 0.01
print("HOLDS: LayerNorm's fp32 gradients are sums in bf16 and are off by up to 40 %" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
