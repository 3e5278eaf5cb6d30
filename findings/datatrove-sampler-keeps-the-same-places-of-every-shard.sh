#!/usr/bin/env bash
# Surprise: each task of datatrove's SamplerFilter draws the same random numbers, so all shards keep the documents at the same
#   places, with a seed and without one. With rate 0.5 and 20 tasks of 20 documents, one pattern decides for all 400: 240 are kept
#   with seed 1 (200 +- 10 are expected). With one task it is a random half of the 400. There is no message.
# Versions: datatrove 0.10.1 (the newest release), numpy 2.4.6. Date: 2026-11-29.
# Belief: each document is kept by a draw of its own with the rate, whatever the number of tasks.
# Source: the docstring of SamplerFilter (randomly keep rate * 100 % of the samples), and datatrove's README, which names it for
#   random subsamples of trillions of tokens.
# Cause: SamplerFilter.__init__ in datatrove/pipeline/filters/sampler_filter.py builds numpy's default_rng(seed); each task gets a
#   copy of the pipeline in this state, and the rank of the task does not enter.
# Depends on: nothing of the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet 'datatrove[io,processing]==0.10.1' numpy==2.4.6
cat > "$work/program.py" <<'PY'
import json
import os
import shutil
import sys
from importlib.metadata import version

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.filters import SamplerFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter

SHARDS = 20
DOCUMENTS = 20  # in each shard


def write():
    os.makedirs("in")
    for shard in range(SHARDS):
        with open(f"in/{shard:03d}.jsonl", "w") as file:
            for place in range(DOCUMENTS):
                file.write(json.dumps({"text": f"document {place} of {shard}", "id": f"{shard}/{place}"}) + "\n")


def kept_places(seed, tasks):
    """Return for each shard the places of the documents that a filter with rate 0.5 keeps."""
    shutil.rmtree("out", ignore_errors=True)
    steps = [JsonlReader("in"), SamplerFilter(0.5, seed=seed), JsonlWriter("out", compression=None)]
    LocalPipelineExecutor(steps, tasks=tasks, workers=min(tasks, 2), logging_dir=None).run()
    places = [[] for _ in range(SHARDS)]
    for name in os.listdir("out"):
        with open(os.path.join("out", name)) as file:
            for line in file:
                shard, place = json.loads(line)["id"].split("/")
                places[int(shard)].append(int(place))
    return [tuple(sorted(each)) for each in places]


if __name__ == "__main__":
    print("datatrove", version("datatrove"), "numpy", version("numpy"))
    write()
    holds = True
    total = SHARDS * DOCUMENTS
    for seed in (1, 2, 3):
        for tasks in (1, SHARDS):
            places = kept_places(seed, tasks)
            patterns = len(set(places))
            kept = sum(map(len, places))
            print(f"seed {seed}, {tasks} tasks: {kept} of {total} kept, {patterns} patterns in {SHARDS} shards")
            holds = holds and patterns == (1 if tasks == SHARDS else SHARDS)
    places = kept_places(None, SHARDS)
    print(f"no seed, {SHARDS} tasks: {sum(map(len, places))} of {total} kept, {len(set(places))} patterns")
    holds = holds and len(set(places)) == 1
    print("belief: 200 +- 10 kept, 20 patterns, for any number of tasks")
    print("HOLDS: all tasks keep the same places" if holds else "no longer so")
    sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py 2> log || { tail -5 log; exit 1; }  # datatrove logs each task
