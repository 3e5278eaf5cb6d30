#!/usr/bin/env bash
# Surprise: rotary-embedding-torch counts the positions in the type of the queries. In bf16 the positions above 256 are rounded
#   to multiples of 2, 4, 8: 2,048 positions have 641 different rotations, and at the end eight neighbours share one. So the score of a query
#   and a key at a fixed distance depends on where they stand. At distance 100 it has a standard deviation of
#   2.7 around the right value of 1.56; rounding of the rotated vectors alone gives 0.01. Autocast with bf16 has the same effect,
#   since a linear layer gives bf16 queries. The first call also fills a cache: an fp32 call after a bf16 call of the
#   same module gets the rounded rotations. fp16 is right up to 2,048 positions.
# Versions: rotary-embedding-torch 0.9.1 (the newest release), torch 2.13.0. Date: 2026-11-29.
# Belief: angles are computed in fp32, and bf16 rounds the rotated vectors only; a score depends on the distance.
# Source: Su et al. 2021, section 3.2.2 (the inner product depends on the relative position only); the code of the package, which
#   keeps its frequencies in fp32 and turns autocast off in forward and in apply_rotary_emb.
# Cause: rotate_queries_or_keys in rotary_embedding_torch.py passes the type of its input to get_seq_pos, which calls
#   torch.arange with it. rotate_queries_and_keys (xpos) does the same. forward stores the result in cached_freqs.
# Depends on: nothing of the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 rotary-embedding-torch==0.9.1 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import importlib.metadata
import sys
import warnings

warnings.filterwarnings("ignore")
import torch
from rotary_embedding_torch import RotaryEmbedding

LENGTH, SIZE, DISTANCE = 2048, 64, 100


def reference(vectors):
    """Return the rotated vectors, computed in fp64 from the formula of the paper."""
    frequencies = 10_000.0 ** (-torch.arange(0, SIZE, 2, dtype=torch.float64) / SIZE)
    angles = torch.arange(vectors.shape[-2], dtype=torch.float64)[:, None] * frequencies
    even, odd = vectors.double()[..., 0::2], vectors.double()[..., 1::2]
    return torch.stack((even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()), -1).flatten(-2)


def by_package(vectors):
    return RotaryEmbedding(dim=SIZE).rotate_queries_or_keys(vectors)


def under_autocast(vectors):
    """Return what a layer of fp32 weights and its rotation give under autocast."""
    layer = torch.nn.Linear(SIZE, SIZE, bias=False)
    torch.nn.init.eye_(layer.weight)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        return by_package(layer(vectors))


def measure(rotate, kind):
    """Return how many positions have different rotations, and mean and deviation of the scores at a distance of 100."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(SIZE, generator=generator).to(kind).expand(1, 1, LENGTH, SIZE).contiguous() for _ in range(2))
    query, key = rotate(query)[0, 0], rotate(key)[0, 0]
    scores = torch.diagonal(query.double() @ key.double().T, -DISTANCE)
    return len({tuple(row) for row in query.tolist()}), round(scores.mean().item(), 2), round(scores.std().item(), 2)


print("rotary-embedding-torch", importlib.metadata.version("rotary-embedding-torch"), "torch", torch.__version__)
seen = {
    "formula, rounded to bf16": measure(lambda vectors: reference(vectors).bfloat16(), torch.bfloat16),
    "package, fp32": measure(by_package, torch.float32),
    "package, fp16": measure(by_package, torch.float16),
    "package, bf16": measure(by_package, torch.bfloat16),
    "package, fp32 layer under autocast with bf16": measure(under_autocast, torch.float32),
}
for name, (rotations, mean, deviation) in seen.items():
    print(f"{name}: {rotations} of {LENGTH} positions differ; scores at distance {DISTANCE}: mean {mean}, standard deviation {deviation}")
module = RotaryEmbedding(dim=SIZE)
ones = torch.ones(1, 1, LENGTH, SIZE)
before = (module.rotate_queries_or_keys(ones) - reference(ones)).abs().max().item()
module = RotaryEmbedding(dim=SIZE)
module.rotate_queries_or_keys(ones.bfloat16())
after = (module.rotate_queries_or_keys(ones) - reference(ones)).abs().max().item()
print(f"largest error of fp32 vectors of ones: {before:.5f} in a new module, {after:.2f} after a call with bf16")
print("belief: bf16 has the scores of the formula, up to rounding, and the cache changes nothing")
right = [seen[name] for name in ("formula, rounded to bf16", "package, fp32", "package, fp16")]
wrong = [seen[name] for name in ("package, bf16", "package, fp32 layer under autocast with bf16")]
holds = all(rotations == LENGTH and deviation < 0.05 for rotations, _, deviation in right)
holds = holds and all(rotations < 700 and deviation > 1 for rotations, _, deviation in wrong) and before < 0.01 and after > 1
print("HOLDS: in bf16, neighbours beyond position 256 get the same rotation" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
