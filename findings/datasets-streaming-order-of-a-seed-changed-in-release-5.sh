#!/usr/bin/env bash
# Surprise: with the same seed and the same files, shuffle() of a streaming dataset gives three different orders in datasets
#   4.8.5, 5.0.1 and 5.2.0. Release 5.0 began to mix up to ten shards in the buffer, and 5.1 began to empty the buffer in
#   halves. So an upgrade in the middle of a run changes which documents come next. A state that 4.8.5 saved does not load
#   in the later releases: KeyError 'examples_iterable' for files ('shard_idx' for a generator), which names neither the
#   release nor what to do. The change of order has no warning.
# Versions: datasets 4.8.5, 5.0.1 and 5.2.0 (the newest release). Releases 4.5.0 to 4.8.5 give one order, 5.0.0 and 5.0.1
#   another, 5.1.0 and 5.2.0 a third. Date: 2026-11-28.
# Belief: a seed makes the order reproducible, and a saved state resumes the stream.
# Source: the documentation of IterableDataset.shuffle (seed) and of state_dict and load_state_dict.
# Depends on: nothing of the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export HF_HOME="$work/cache" HF_HUB_OFFLINE=1
for version in 4.8.5 5.0.1 5.2.0; do
    python3 -m venv "$version"
    "$version/bin/pip" install --quiet "datasets==$version" numpy==2.4.6 httpx
done
mkdir shards
python3 - <<'PY'
for shard in "ABCDEF":
    with open(f"shards/{shard}.txt", "w") as file:
        for number in range(400):
            file.write(f"{shard}{number}\n")
PY
cat > read.py <<'PY'
import glob
import json
import os
import sys

import datasets

datasets.utils.logging.set_verbosity_error()


def stream():
    files = sorted(glob.glob("shards/*.txt"))
    data = datasets.load_dataset("text", data_files=files, split="train", streaming=True)
    return data.shuffle(seed=5, buffer_size=60)


order = [row["text"] for row in stream()]
report = {"order": order, "error": None, "rest": None}
if not os.path.exists("state.json"):
    data = stream()
    for number, _ in enumerate(data, 1):
        if number == 900:
            with open("state.json", "w") as file:
                json.dump(data.state_dict(), file)
            break
data = stream()
try:
    with open("state.json") as file:
        data.load_state_dict(json.load(file))
    report["rest"] = sum(1 for _ in data)
except Exception as error:
    report["error"] = f"{type(error).__name__}: {error}"
with open(f"{datasets.__version__}.json", "w") as file:
    json.dump(report, file)
PY
for version in 4.8.5 5.0.1 5.2.0; do
    "$version/bin/python" read.py
done
cat > program.py <<'PY'
import json
import sys

VERSIONS = ("4.8.5", "5.0.1", "5.2.0")
reports = {}
for version in VERSIONS:
    with open(f"{version}.json") as file:
        reports[version] = json.load(file)
    order = reports[version]["order"]
    shards = sorted({row[0] for row in order[:60]})
    print(f"datasets {version}: first rows {order[:5]}, shards of the first 60 rows {shards}")
    print(f"datasets {version}: state of 4.8.5: {reports[version]['error'] or 'loads'}, rows after it: "
          f"{reports[version]['rest']}")
print("belief: one order, and the state loads in each release")
orders = {tuple(reports[version]["order"]) for version in VERSIONS}
rows = {tuple(sorted(order)) for order in orders}
holds = len(orders) == 3 and len(rows) == 1 and reports["4.8.5"]["error"] is None
for version in ("5.0.1", "5.2.0"):
    holds = holds and reports[version]["error"] == "KeyError: 'examples_iterable'"
print("HOLDS: one seed, three orders, and the old state raises KeyError" if holds else "no longer so")
sys.exit(not holds)
PY
python3 program.py
