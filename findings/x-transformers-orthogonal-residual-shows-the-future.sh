#!/usr/bin/env bash
# Surprise: a Decoder of x-transformers with orthog_residual=True sees the future, and so does one with attn_orthog_projected_values=True.
#   The output at each position depends on all later tokens. Trained on uniformly random tokens of 16 kinds, where no causal
#   model can have a loss below ln 16 = 2.77 nats, they reach 2.2 after 600 steps and are still falling. So the training and
#   validation losses of such a model are too good, and generation, where the future is missing, has other logits than training:
#   before any training, those of a prefix of 8 tokens differ by 4 % and 24 % of their norm. There is no message.
# Versions: x-transformers 2.31.10 (the newest release), torch 2.13.0. Date: 2026-11-29.
# Belief: a Decoder is causal with every option. Both options project the vector of each token on the vector of the same token.
# Source: the README of x-transformers (Decoder is the decoder-only, GPT-like form), and the papers which the code names for the
#   options: Oh et al. 2025, arXiv 2505.11881 (each token's update without its part along the token's stream), and BeliefFormer
#   (the perpendicular part of the weighted sum with respect to the value vectors of the token).
# Cause: orthog_project in x_transformers/x_transformers.py packs its arguments with "b *". That makes one vector of the
#   whole sequence, so the inner product and the norm run over all positions. With a projection by token in its
#   place, the same program stays at ln 16.
# Depends on: nothing of the machine. attn_orthog_projected_values_per_head uses the same function.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 x-transformers==2.31.10 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import importlib.metadata
import math
import sys

import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper, x_transformers

KINDS, STEPS = 16, 600
OPTIONS = {"no option": {}, "orthog_residual": {"orthog_residual": True},
           "attn_orthog_projected_values": {"attn_orthog_projected_values": True}}


def by_token(x, y):
    """Return the part of x that is orthogonal to y, for each token."""
    unit = torch.nn.functional.normalize(y, dim=-1)
    return x - (x * unit).sum(-1, keepdim=True) * unit


def build(options):
    torch.manual_seed(0)
    layers = Decoder(dim=64, depth=2, heads=4, attn_dim_head=32, rotary_pos_emb=True, **options)
    return TransformerWrapper(num_tokens=KINDS, max_seq_len=32, attn_layers=layers)


def relative(seen, right):
    return ((seen - right).norm() / right.norm()).item()


def causality(options):
    """Return how far the outputs move when the last token changes, and how far those of a prefix are from those of the whole."""
    model = build(options).eval()
    tokens = torch.randint(0, KINDS, (8, 32), generator=torch.Generator().manual_seed(1))
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % KINDS
    with torch.no_grad():
        logits, changed, prefix = model(tokens), model(other), model(tokens[:, :8])
    return relative(changed[:, :-1], logits[:, :-1]), relative(logits[:, :8], prefix)


def loss_on_random_tokens(options):
    """Return the mean loss of the last 100 steps of a training on new random tokens in each step."""
    model = AutoregressiveWrapper(build(options))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        loss = model(torch.randint(0, KINDS, (32, 5), generator=generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-100:]) / 100


print("x-transformers", importlib.metadata.version("x-transformers"), "torch", torch.__version__)
print(f"smallest loss of a causal model: ln {KINDS} = {math.log(KINDS):.3f}")
holds = True
original = x_transformers.orthog_project
for project, where in ((original, "as released"), (by_token, "with a projection by token")):
    x_transformers.orthog_project = project
    for name, options in OPTIONS.items():
        last, prefix = causality(options)
        loss = loss_on_random_tokens(options)
        print(f"{name}, {where}: changing the last token moves the outputs before it by {last:.4f} of their norm, a prefix differs by "
              f"{prefix:.4f}; loss after {STEPS} steps {loss:.3f}")
        if project is original and options:
            holds = holds and last > 1e-3 and prefix > 1e-2 and loss < math.log(KINDS) - 0.3
        else:
            holds = holds and last == 0 and prefix < 1e-4 and math.log(KINDS) - 0.02 < loss < math.log(KINDS) + 0.05
print("belief: no output moves, and no loss is below ln 16")
print("HOLDS: with orthog_residual, a Decoder predicts random tokens better than chance" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py 2> log || { cat log; exit 1; }
