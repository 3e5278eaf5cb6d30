#!/usr/bin/env bash
# Surprise: the global shuffle of grain gives batches that no random order gives. A corpus of 1,000,000 rows lies in shards of 2,048
#   rows, by turns of one source and of another. After shuffle(), batches of 32 have 0 to 32 rows of the first source, and the
#   variance of this number is 6 times that of a random order. With shards of 16,384 and batches of 256 it is 16 to 22 times.
#   If the first half of 1,048,576 rows is one source and the second half another, it is the reverse: each batch of 32
#   has exactly 16 rows of each. All seeds tried behave like this. A million rows in shards of 20,000, or 50,000 in shards of 1,000,
#   are near a random order, so another test may show nothing. IndexSampler of the DataLoader has the same order.
# Versions: grain 0.2.18 (the newest release), numpy 2.4.6. Date: 2026-11-29.
# Belief: a global shuffle is one of all orders with equal probability. So the number of rows of a source in a batch has the
#   hypergeometric variance, whatever the order of the files.
# Source: the docstring of MapDataset.shuffle (the same elements in a globally shuffled order; the order is
#   another one "with probability (1 - 1/5!)" for five elements, which is the uniform law).
# Cause: ShuffleMapDataset._shuffled_index in grain/_src/python/dataset/transformations/shuffle.py calls index_shuffle with
#   rounds=4. This is a small block cipher on the bits of the index, and four rounds do not mix the bits of consecutive
#   indices. The header of index_shuffle recommends 8 rounds, which the program shows to be right. shuffle() has no
#   argument for it.
# Depends on: nothing of the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet grain==0.2.18 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import importlib.metadata
import logging
import sys

logging.disable(logging.WARNING)
import grain
import numpy as np
from grain._src.python.experimental.index_shuffle.python import index_shuffle_module

SEEDS = (0, 1, 42, 99_999)
BATCHES = 200
CASES = (  # rows, rows of a shard, rows of a batch, limits of the ratio of the variances
    (1_000_000, 2048, 32, 3, 12),
    (1_000_000, 16_384, 256, 8, 40),
    (10_000_000, 65_536, 1024, 6, 40),
    (1_048_576, 524_288, 32, 0, 0),
    (1_000_000, 20_000, 256, 0.6, 1.5),
    (50_000, 1000, 32, 0.6, 1.5),
)


def by_numpy(rows, number, seed):
    return np.random.default_rng(seed).permutation(rows)[:number]


def by_grain(rows, number, seed):
    data = grain.MapDataset.range(rows).shuffle(seed=seed)
    return np.array([data[index] for index in range(number)])


def by_eight_rounds(rows, number, seed):
    shuffle = index_shuffle_module.index_shuffle
    return np.array([shuffle(index, max_index=rows - 1, seed=seed, rounds=8) for index in range(number)])


def spread(order, rows, shard, batch):
    """Return the variance of the rows of the first source in a batch over the hypergeometric one, and the extremes."""
    first = np.arange(rows) // shard % 2 == 0
    counts = first[order].reshape(BATCHES, batch).sum(axis=1)
    share = first.mean()
    expected = batch * share * (1 - share) * (rows - batch) / (rows - 1)
    return float(counts.var(ddof=1) / expected), int(counts.min()), int(counts.max())


print("grain", importlib.metadata.version("grain"), "numpy", np.__version__)
sampler = grain.samplers.IndexSampler(1_000_000, shuffle=True, seed=42, num_epochs=1)
holds = by_grain(1_000_000, 1000, 42).tolist() == [sampler[index].record_key for index in range(1000)]
for rows, shard, batch, low, high in CASES:
    for name, order in (("numpy", by_numpy), ("grain", by_grain), ("eight rounds", by_eight_rounds)):
        seen = [spread(order(rows, BATCHES * batch, seed), rows, shard, batch) for seed in SEEDS]
        least, most = min(seen)[0], max(seen)[0]
        print(f"{rows} rows, shards of {shard}, batches of {batch}, {name}: variance {least:.2f} to {most:.2f} times the hypergeometric "
              f"one; {min(lowest for _, lowest, _ in seen)} to {max(highest for _, _, highest in seen)} rows of the first source")
        limits = (low, high) if name == "grain" else (0.6, 1.5)
        holds = holds and limits[0] <= least and most <= limits[1]
print("belief: grain's variance is 1 times the hypergeometric one, up to the noise that numpy shows")
print("HOLDS: batches of a global shuffle of grain show the order of the files" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
