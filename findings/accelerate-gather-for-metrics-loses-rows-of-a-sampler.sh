#!/usr/bin/env bash
# Surprise: gather_for_metrics of accelerate cuts the last batch to a length that it computes from the whole dataset, also if the
#   sampler gives a part of it. An evaluation of 512 rows out of 1,025 in batches of 64 gets 449 rows on one process and 385
#   on two. If the rows are in order of length, the longest ones are lost: the mean of the row numbers is 192.0 instead of 255.5.
#   A part of 60 out of 96 rows in batches of 8 gets 60 rows on one process, 64 on two and 72 on three, some of them twice.
#   A batch sampler, SubsetRandomSampler and RandomSampler(num_samples=...) do the same. A Subset of the dataset and
#   dispatch_batches=True are right. gather() has all rows. There is no message.
# Versions: accelerate 1.15.0 (the newest release), torch 2.13.0. Date: 2026-11-29.
# Belief: gather_for_metrics returns each row that the data loader gives once, and on one process it changes nothing.
# Source: the docstring of Accelerator.gather_for_metrics (gathers and potentially drops duplicates in the last batch if on a
#   distributed system).
# Cause: DataLoaderStateMixin.begin in accelerate/data_loader.py sets the remainder to len(self.dataset) % self.total_batch_size
#   and does not look at the sampler. gather_for_metrics in accelerate/accelerator.py cuts the last batch to it.
# Depends on: nothing of the machine. The program starts up to three processes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 accelerate==1.15.0 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import json
import logging
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Subset, SubsetRandomSampler

ROWS, CHOSEN = range(1025), range(512)
LOADERS = {
    "all rows": lambda: DataLoader(ROWS, batch_size=64),
    "Subset": lambda: DataLoader(Subset(ROWS, CHOSEN), batch_size=64),
    "sampler in order": lambda: DataLoader(ROWS, batch_size=64, sampler=CHOSEN),
    "batch sampler": lambda: DataLoader(ROWS, batch_sampler=BatchSampler(CHOSEN, 64, drop_last=False)),
    "SubsetRandomSampler": lambda: DataLoader(ROWS, batch_size=64, sampler=SubsetRandomSampler(CHOSEN)),
    "RandomSampler": lambda: DataLoader(ROWS, batch_size=64, sampler=RandomSampler(ROWS, num_samples=512)),
    "60 of 96 rows": lambda: DataLoader(range(96), batch_size=8, sampler=range(60)),
}
RIGHT = dict.fromkeys(LOADERS, 512) | {"all rows": 1025, "60 of 96 rows": 60}


def worker(rank, ranks, dispatch, folder):
    """Evaluate all loaders; write the rows that a metric gets, the number of different ones, and their mean."""
    torch.set_num_threads(1)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if ranks > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    from accelerate import Accelerator, DataLoaderConfiguration

    logging.disable(logging.WARNING)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    assert accelerator.num_processes == ranks
    seen = {}
    for name, make in LOADERS.items():
        rows, gathered = [], []
        for batch in accelerator.prepare(make()):
            rows += accelerator.gather_for_metrics(batch).tolist()
            gathered += accelerator.gather(batch).tolist()
        seen[name] = (len(rows), len(set(rows)), sum(rows) / len(rows), len(set(gathered)))
    if rank == 0:
        with open(f"{folder}/seen.json", "w") as file:
            json.dump(seen, file)
    if ranks > 1:
        dist.barrier()
    os._exit(0)  # gloo's threads may end late


if __name__ == "__main__":
    import accelerate

    print("accelerate", accelerate.__version__, "torch", torch.__version__)
    table = {}
    for ranks, dispatch in ((1, None), (2, None), (3, None), (2, True)):
        with tempfile.TemporaryDirectory(dir=os.getcwd()) as folder:
            mp.spawn(worker, (ranks, dispatch, folder), nprocs=ranks)
            with open(f"{folder}/seen.json") as file:
                seen = json.load(file)
        for name, (rows, different, mean, gathered) in seen.items():
            print(f"{ranks} process(es){', dispatch_batches=True' if dispatch else ''}, {name}: {rows} rows, {different} different, mean "
                  f"{mean:.1f}; gather has {gathered} different rows; right: {RIGHT[name]} rows")
            table[ranks, dispatch, name] = rows
    print("belief: the right number of rows everywhere")
    holds = True
    for ranks, lost in ((1, 63), (2, 127), (3, 63)):
        holds = holds and table[ranks, None, "all rows"] == 1025 and table[ranks, None, "Subset"] == 512
        for name in ("sampler in order", "batch sampler", "SubsetRandomSampler", "RandomSampler"):
            holds = holds and table[ranks, None, name] == 512 - lost
    holds = holds and [table[ranks, None, "60 of 96 rows"] for ranks in (1, 2, 3)] == [60, 64, 72]
    holds = holds and all(table[2, True, name] == right for name, right in RIGHT.items())
    print("HOLDS: gather_for_metrics drops up to a quarter of the rows of a sampler" if holds else "no longer so")
    sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
