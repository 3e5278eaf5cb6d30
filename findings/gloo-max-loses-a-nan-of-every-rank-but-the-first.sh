#!/usr/bin/env bash
# Surprise: an all-reduce with MAX or MIN on gloo loses NaN. Of a tensor with one element, only the NaN of rank 0 reaches
#   the other ranks. Of a longer tensor, gloo keeps a NaN in the ranges of elements that some ranks own and drops it in the
#   others. Every rank gets the same wrong result, and the result holds a plausible number. SUM keeps every NaN.
# Versions: torch 2.13.0, gloo as built into it. Releases 2.14.1 and 2.15.0 behave the same. Date: 2026-11-28.
# Belief: the maximum of NaN and 1 is NaN, so a maximum over ranks tells all ranks that one of them has a NaN.
# Source: the documentation of torch.maximum ("if one of the elements being compared is a NaN, then that element is
#   returned"); the page on torch.distributed lists MAX without an exception for NaN.
# Depends on: nothing of the machine. The program starts four processes on one machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 4
SIZES = (1, 40)
OPERATIONS = ("SUM", "MAX", "MIN")


def work(rank, answers):
    """Reduce tensors in which one rank holds NaN and the others hold 5; rank 0 reports how many NaN are left."""
    dist.init_process_group("gloo", init_method="file://" + sys.path[0] + "/store", rank=rank, world_size=RANKS)
    for operation in OPERATIONS:
        for size in SIZES:
            left = []
            for owner in range(RANKS):
                values = torch.full((size,), 5.0)
                if rank == owner:
                    values.fill_(float("nan"))
                dist.all_reduce(values, op=getattr(dist.ReduceOp, operation))
                left.append(int(values.isnan().sum()))
            if rank == 0:
                answers.put((operation, size, left))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__, "with", RANKS, "ranks on gloo")
    answers = mp.get_context("spawn").SimpleQueue()
    mp.start_processes(work, (answers,), nprocs=RANKS)
    left = {}
    for _ in OPERATIONS:
        for _ in SIZES:
            operation, size, counts = answers.get()
            left[operation, size] = counts
            print(f"{operation}, {size} elements: NaN left if rank 0, 1, 2, 3 holds only NaN: {counts}")
    print(f"belief: 1, 1, 1, 1 and 40, 40, 40, 40 in every row; torch.maximum gives "
          f"{torch.maximum(torch.tensor(5.0), torch.tensor(float('nan'))).item()}")
    holds = left["SUM", 1] == [1] * RANKS and left["SUM", 40] == [40] * RANKS
    for operation in ("MAX", "MIN"):
        holds = holds and left[operation, 1] == [1, 0, 0, 0]
        holds = holds and all(0 < count < 20 for count in left[operation, 40])
    print("HOLDS: MAX and MIN drop the only NaN of ranks 1, 2 and 3" if holds else "no longer so")
    sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
