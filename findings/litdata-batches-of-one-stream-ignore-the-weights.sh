#!/usr/bin/env bash
# Surprise: litdata's CombinedStreamingDataset with batching_method="per_stream" never draws the same dataset twice in a row. So two
#   datasets take turns, and each gives half of the batches, whatever the weights are: 0.9 and 0.1 give 0.5 and 0.5. Of three
#   datasets with weights 0.8, 0.1 and 0.1, the first gives 0.47. The default method, "stratified", keeps to the weights.
#   With iterate_over_all=True, whose weights are the lengths, a dataset with a tenth of the rows is used up after a fifth of
#   the epoch, and the other four fifths hold one dataset only. There is no message.
# Versions: litdata 0.2.76 (the newest release), torch 2.13.0. Date: 2026-11-29.
# Belief: each batch comes from a dataset that is drawn with its weight, so the shares of the batches are the weights.
# Source: the docstring of CombinedStreamingDataset (weights: the sampling ratio for the datasets; per_stream: batches consist of
#   samples from a single dataset, which is selected randomly).
# Cause: _CombinedDatasetIterator._get_dataset_index in litdata/streaming/combined.py draws again until the dataset is another
#   one. A dataset with weight w has then the share w (1 - w) / sum of all w (1 - w).
# Depends on: nothing of the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 litdata==0.2.76 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import logging
import sys
import warnings
from importlib.metadata import version

warnings.filterwarnings("ignore")
import torch

logging.disable(logging.CRITICAL)
from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset
from litdata.streaming import Cache

BATCH = 4
ROWS = {"a": 20000, "b": 20000, "c": 20000, "long": 7200, "short": 800}


def write():
    """Write one dataset for each name; every row holds the number of its dataset."""
    for number, (name, rows) in enumerate(ROWS.items()):
        cache = Cache(name, chunk_size=2000)
        for row in range(rows):
            cache[row] = number
        cache.done()
        cache.merge()


def batches(names, method, weights=None, rows=None):
    """Return the dataset's place in names for each batch, or a list of places if a batch mixes datasets."""
    combined = CombinedStreamingDataset(
        [StreamingDataset(name) for name in names], seed=1, weights=weights, iterate_over_all=weights is None,
        batching_method=method,
    )
    numbers = [list(ROWS).index(name) for name in names]
    return [[numbers.index(int(row)) for row in batch] for batch in StreamingDataLoader(combined, batch_size=BATCH)]


def shares(found, count):
    rows = [place for batch in found for place in batch]
    return [round(rows.count(place) / len(rows), 3) for place in range(count)]


print("litdata", version("litdata"), "torch", torch.__version__)
write()
holds = True
for weights in ((0.9, 0.1), (0.7, 0.3), (0.8, 0.1, 0.1)):
    names = list("abc")[:len(weights)]
    total = sum(weight * (1 - weight) for weight in weights)
    formula = [round(weight * (1 - weight) / total, 3) for weight in weights]
    seen = {}
    for method in ("stratified", "per_stream"):
        found = batches(names, method, weights)
        seen[method] = shares(found, len(weights))
        if method == "per_stream":
            assert all(len(set(batch)) == 1 for batch in found)
            order = [batch[0] for batch in found]
            again = sum(first == second for first, second in zip(order, order[1:]))
        print(f"weights {weights}, {method}: shares of the rows {seen[method]}")
    print(f"  per_stream: {again} of {len(order) - 1} batches come from the dataset of the batch before; "
          f"w (1 - w) / sum: {formula}")
    holds = holds and again == 0
    holds = holds and all(abs(share - weight) < 0.02 for share, weight in zip(seen["stratified"], weights))
    holds = holds and all(abs(share - value) < 0.02 for share, value in zip(seen["per_stream"], formula))
found = batches(("long", "short"), "per_stream")
last = max(number for number, batch in enumerate(found) if 1 in batch)
print(f"iterate_over_all with {ROWS['long']} and {ROWS['short']} rows: the short dataset ends with batch {last + 1} of {len(found)}")
mixed = batches(("long", "short"), "stratified")
mixed_last = max(number for number, batch in enumerate(mixed) if 1 in batch)
print(f"  the same, stratified: it ends with batch {mixed_last + 1} of {len(mixed)}")
holds = holds and last + 1 < 0.21 * len(found) and mixed_last + 1 > 0.9 * len(mixed)
print("belief: the shares of per_stream are the weights, 0.9 and 0.1 in the first case")
print("HOLDS: per_stream takes turns and ignores the weights" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
