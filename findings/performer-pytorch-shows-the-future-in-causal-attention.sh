#!/usr/bin/env bash
# Surprise: the causal attention of performer-pytorch depends on later keys. The exponentials of all keys are divided by one
#   maximum over the whole sequence, and a constant of 0.0001 is added afterwards. The division cancels, the constant does not:
#   when a later key is large, the features of all earlier keys sink towards the constant. Multiplying the last of 64 keys by
#   3 changes the first 32 outputs by 15 % on average, so the past tells whether a later key is large. A step-by-step
#   generation therefore differs from training. With generalized_attention=True nothing leaks.
# Versions: performer-pytorch 1.1.4 (the newest release), torch 2.13.0. Date: 2026-11-30.
# Belief: causal=True means that an output depends on keys up to its own place; an error of the random features is the only one.
# Source: the README (causal=True for autoregressive models) and the Performer paper (causal attention by prefix sums). In issue
#   45 of lucidrains/performer-pytorch the maximum is called a plain stabiliser taken from the paper's own code.
# Depends on: nothing of the machine (without the optional CUDA package; its features are the same).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 performer-pytorch==1.1.4 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import contextlib
import importlib.metadata
import io
import sys

import torch
from performer_pytorch import FastAttention, PerformerLM

torch.set_num_threads(1)
LENGTH, HALF = 64, 32


def change(factor, generalized, seed):
    """Return by how much the first half of the outputs changes if the last key is multiplied by this factor."""
    torch.manual_seed(seed)
    attention = FastAttention(dim_heads=64, nb_features=256, causal=True, generalized_attention=generalized).double()
    queries, keys, values = torch.randn(3, 1, 1, LENGTH, 64, dtype=torch.float64)
    before = attention(queries, keys, values)[:, :, :HALF]
    keys = keys.clone()
    keys[:, :, -1] *= factor
    after = attention(queries, keys, values)[:, :, :HALF]
    return ((after - before).norm() / before.norm()).item()


def bits_read_from_the_past(seed, trials=400):
    """Return how often the first half of the outputs, seen for both cases once, tells whether the last key is large."""
    torch.manual_seed(seed)
    attention = FastAttention(dim_heads=64, nb_features=256, causal=True).double()
    queries, keys, values = torch.randn(3, 1, 1, LENGTH, 64, dtype=torch.float64)
    large = keys.clone()
    large[:, :, -1] *= 3
    seen = [attention(queries, k, values)[:, :, :HALF] for k in (keys, large)]
    right = 0
    for _ in range(trials):
        secret = int(torch.randint(2, ()))
        past = attention(queries, (keys, large)[secret], values)[:, :, :HALF]
        right += int((past - seen[1]).norm() < (past - seen[0]).norm()) == secret
    return right / trials


with contextlib.redirect_stdout(io.StringIO()):
    torch.manual_seed(0)
    model = PerformerLM(num_tokens=256, max_seq_len=LENGTH, dim=64, depth=2, heads=2, dim_head=32, causal=True).eval()
tokens = torch.randint(0, 256, (8, LENGTH))
other = tokens.clone()
other[:, HALF:] = torch.randint(0, 256, (8, HALF))
with torch.no_grad():
    logits = model(tokens)[:, :HALF]
    drift = ((model(other)[:, :HALF] - logits).norm() / logits.norm()).item()

print("performer-pytorch", importlib.metadata.version("performer-pytorch"), "torch", torch.__version__)
softmax = {}
relu = {}
for factor in (1, 2, 3, 4):
    softmax[factor] = sum(change(factor, False, seed) for seed in range(20)) / 20
    relu[factor] = sum(change(factor, True, seed) for seed in range(20)) / 20
    print(f"last of {LENGTH} keys times {factor}: the first {HALF} outputs change by {softmax[factor]:.1%} (mean of 20 seeds); "
          f"with generalized_attention by {relu[factor]:.1%}")
share = sum(bits_read_from_the_past(seed) for seed in range(3)) / 3
print(f"size of the last key, read from the first {HALF} outputs: right in {share:.1%} of 400 trials (3 seeds)")
print(f"untrained PerformerLM: other tokens after place {HALF} change the logits before it by {drift:.2e} of their size")
print("belief: 0.0% in every row, 50 % of the trials, 0 in the logits")
holds = softmax[1] == 0 and softmax[3] > 0.1 and max(relu.values()) == 0 and share > 0.9 and drift > 1e-5
print("HOLDS: a later key changes earlier outputs of the causal attention" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
"$work/venv/bin/python" program.py
