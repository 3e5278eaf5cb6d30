#!/usr/bin/env bash
# Surprise: WebDataset(shards, shardshuffle=100) of webdataset 0.2.111 and 1.0.2 gives the shards in the same order in every epoch.
#   The sample buffer of .shuffle() hides it from a look at single samples. With a buffer of a shard's size, a sample of the
#   last shard comes last in each of ten epochs, and the mean places of the shards correlate with 0.999 or more
#   between two epochs; in 0.2.100 they do not. Within one process, detshuffle=True changes the order from epoch to epoch,
#   so the option whose name promises the least variation has more. There is no message.
# Versions: webdataset 1.0.2 (the newest release) and 0.2.111, against 0.2.100; numpy 2.4.6. Date: 2026-11-29.
# Belief: each iteration over the dataset shuffles the shards anew, as in 0.2.100, since no seed is given.
# Source: the docstring of WebDataset (shardshuffle: the number of shards to shuffle; detshuffle: whether to use deterministic shuffling,
#   False by default; seed: None by default).
# Cause: WebDataset.__init__ in webdataset/compat.py draws one seed per object and gives it to filters.shuffle, and _shuffle in
#   webdataset/filters.py makes a new generator from it in each epoch. An open pull request of July 2026 (502) would change it.
# Depends on: nothing of the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for version in 0.2.100 0.2.111 1.0.2; do
  python3 -m venv "$work/$version"
  "$work/$version/bin/pip" install --quiet webdataset=="$version" numpy==2.4.6
done
cat > "$work/program.py" <<'PY'
import json
import sys
import warnings
from importlib.metadata import version

warnings.filterwarnings("ignore")
import numpy as np
import webdataset

SHARDS, SIZE, EPOCHS = 20, 50, 10
shards = [f"shard{number:02d}.tar" for number in range(SHARDS)]
for number, shard in enumerate(shards):
    with webdataset.TarWriter(shard) as writer:
        for sample in range(SIZE):
            writer.write({"__key__": f"{number:02d}{sample:02d}", "txt": str(number)})


def places(dataset):
    """Return the mean place of each shard's samples, for each epoch; every sample must come once in an epoch."""
    rows = []
    for _ in range(EPOCHS):
        found = np.array([int(sample["txt"]) for sample in dataset])
        assert len(found) == SHARDS * SIZE and (np.bincount(found) == SIZE).all()
        rows.append([np.flatnonzero(found == number).mean() for number in range(SHARDS)])
    return np.array(rows)


result = {}
for name, options in (("shardshuffle", {}), ("detshuffle", {"detshuffle": True})):
    if options and version("webdataset") == "0.2.100":
        continue  # this release needs a seed for detshuffle
    plain = places(webdataset.WebDataset(shards, shardshuffle=100, **options))
    mixed = places(webdataset.WebDataset(shards, shardshuffle=100, **options).shuffle(SIZE))
    correlation = np.corrcoef(mixed)[np.triu_indices(EPOCHS, 1)].mean()
    result[name] = [len(np.unique(plain, axis=0)), float(correlation), len({int(row.argmax()) for row in mixed})]
print("RESULT", json.dumps(result))
PY
cat > "$work/compare.py" <<'PY'
import json
import subprocess
import sys

print("numpy 2.4.6; 20 shards of 50 samples, 10 epochs of one dataset object without a seed")
seen = {}
for version in ("0.2.100", "0.2.111", "1.0.2"):
    output = subprocess.run([f"{version}/bin/python", "program.py"], capture_output=True, text=True, check=True).stdout
    seen[version] = json.loads(output.split("RESULT")[1])
    for name, (orders, correlation, last) in seen[version].items():
        print(f"webdataset {version}, {name}: {orders} orders of the shards in 10 epochs; with .shuffle(50), the places of the "
              f"shards correlate with {correlation:.3f} between epochs, and {last} shards are the last one of an epoch")
print("belief: 10 orders, a correlation near 0")
holds = all(seen[version]["shardshuffle"][0] == 1 and seen[version]["shardshuffle"][1] > 0.99 for version in ("0.2.111", "1.0.2"))
holds = holds and seen["0.2.100"]["shardshuffle"][0] == 10 and abs(seen["0.2.100"]["shardshuffle"][1]) < 0.3
holds = holds and seen["1.0.2"]["detshuffle"][0] == 10 and seen["1.0.2"]["shardshuffle"][2] == 1
print("HOLDS: shardshuffle gives one order of the shards in all epochs" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 python3 compare.py
