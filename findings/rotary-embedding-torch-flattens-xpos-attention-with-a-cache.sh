#!/usr/bin/env bash
# Surprise: with use_xpos=True, rotate_queries_with_cached_keys gives a new token other attention scores than
#   rotate_queries_and_keys gives to the same token in the whole sequence. xPos scales queries and keys by powers of their
#   positions, counted from the middle. The middle of the queries is taken from the queries alone, so for one query and n keys
#   the two middles are n/2 apart and each pair of dimensions has a wrong factor, the smaller the longer the sequence is. The
#   scores are off by 3 % at 40 keys, 31 % at 1,024 and 59 % at 4,096, where those of the nearest keys have a third of their
#   size: generation with a cache flattens the attention more and more. Without xPos the two methods agree.
# Versions: rotary-embedding-torch 0.9.1 (the newest release), torch 2.13.0. Date: 2026-11-30.
# Belief: scores depend on the distance between query and key, so a row of the full matrix and the cached row are equal.
# Source: the README (use this method for cached keys at inference) and issue 27 of lucidrains/rotary-embedding-torch, where
#   the scales were added to this method for that purpose and the issue was closed.
# Depends on: nothing of the machine. The formula of the paper is computed in fp64 and agrees with the whole sequence.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 rotary-embedding-torch==0.9.1 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import importlib.metadata
import sys

import torch
from rotary_embedding_torch import RotaryEmbedding

torch.set_num_threads(1)
DIM = 64


def scores(length, xpos):
    """Return the scores of the last token in the whole sequence, with cached keys, and by the formula of the paper."""
    torch.manual_seed(0)
    queries = torch.randn(1, 1, length, DIM, dtype=torch.float64)
    keys = torch.randn(1, 1, length, DIM, dtype=torch.float64)
    last = queries[:, :, -1:]
    rotary = RotaryEmbedding(dim=DIM, use_xpos=xpos)
    if xpos:
        full, rotated = rotary.rotate_queries_and_keys(queries, keys)
    else:
        full, rotated = rotary.rotate_queries_or_keys(queries), rotary.rotate_queries_or_keys(keys)
    whole = (full[:, :, -1:] @ rotated.transpose(-1, -2)).flatten()
    one, rotated = RotaryEmbedding(dim=DIM, use_xpos=xpos).rotate_queries_with_cached_keys(last, keys)
    cached = (one @ rotated.transpose(-1, -2)).flatten()
    distance = length - 1 - torch.arange(length, dtype=torch.float64)
    pairs = torch.arange(0, DIM, 2, dtype=torch.float64)
    angle = distance[:, None] * 10000.0 ** (-pairs / DIM)
    decay = ((pairs + 0.4 * DIM) / (1.4 * DIM)) ** (distance[:, None] / 512) if xpos else 1.0
    q = torch.view_as_complex(last.reshape(1, -1, 2))
    k = torch.view_as_complex(keys.reshape(length, -1, 2))
    formula = ((q * k.conj() * torch.polar(torch.ones_like(angle), angle)).real * decay).sum(-1)
    return whole, cached, formula


def size(tensor):
    return tensor.pow(2).mean().sqrt().item()


print("rotary-embedding-torch", importlib.metadata.version("rotary-embedding-torch"), "torch", torch.__version__)
error = {}
for xpos in (False, True):
    for length in (40, 256, 1024, 4096):
        whole, cached, formula = scores(length, xpos)
        row = "xPos" if xpos else "plain"
        error[xpos, length] = size(cached - whole) / size(whole)
        check = size(whole - formula) / size(formula)
        near = cached[-32:].pow(2).mean().sqrt() / whole[-32:].pow(2).mean().sqrt()
        error[xpos, length, "formula"] = check
        error[xpos, length, "near"] = near.item()
        print(f"{row}, {length} keys: whole sequence against the formula {check:.5f}, cached against whole "
              f"{error[xpos, length]:.3f}; size of the scores of the 32 nearest keys, cached : whole = {near:.3f}")
print("belief: both differences are 0 and the ratio is 1 in every row")
holds = all(value < 0.01 for key, value in error.items() if key[-1] == "formula")
holds = holds and all(error[False, length] < 1e-3 for length in (40, 256, 1024, 4096))
holds = holds and 0.01 < error[True, 40] < 0.1 and error[True, 1024] > 0.25 and error[True, 4096] > 0.5 and 0.2 < error[True, 4096, "near"] < 0.5
print("HOLDS: with xPos the cached scores shrink as the sequence grows" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
"$work/venv/bin/python" program.py
