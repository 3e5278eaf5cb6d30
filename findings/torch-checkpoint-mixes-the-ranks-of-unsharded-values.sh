#!/usr/bin/env bash
# Surprise: torch.distributed.checkpoint treats an unsharded tensor that all ranks save under one name as a replica, and
#   distributes the writing of replicas over the ranks. If the values differ from rank to rank, the checkpoint takes one
#   tensor from rank 0 and another from rank 1. After loading, all ranks have a state that no rank ever had. There is no error
#   and no warning. Which rank's value is kept depends on the sizes of the other tensors: without a large tensor "bias" is
#   that of rank 0 below, with a large tensor it is that of rank 1. The state of the random generator is that of rank 1.
# Versions: torch 2.13.0. Releases 2.14.1 and 2.15.0 behave the same. Date: 2026-11-28.
# Belief: a rank gets its own values back, or all ranks get those of rank 0, or save() reports the conflict.
# Source: the documentation of torch.distributed.checkpoint.save (SPMD saving; only ShardedTensor and DTensor are
#   described as distributed) and that of torch.save, which stores what its process has.
# Depends on: nothing of the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.multiprocessing as mp

warnings.filterwarnings("ignore")
RANKS = 3
COUNTERS = ("bias", "experts", "loss_scale", "statistics")


def state_of(rank, large):
    """Return what a rank has: counters that hold its number, and a random state that has its number as the seed."""
    state = {}
    if large:
        state["weight"] = torch.zeros(20_000)
    for name in COUNTERS:
        state[name] = torch.full((8,), rank)
    state["rng"] = torch.Generator().manual_seed(rank).get_state()
    return state


def owner_of(loaded):
    """Return the rank whose random state this is."""
    for rank in range(RANKS):
        if torch.equal(loaded, torch.Generator().manual_seed(rank).get_state()):
            return rank
    return None


def work(rank, answers):
    folder = sys.path[0]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    for large in (False, True):
        checkpoint.save(state_of(rank, large), checkpoint_id=f"{folder}/checkpoint-{large}")
        loaded = state_of(rank, large)
        checkpoint.load(loaded, checkpoint_id=f"{folder}/checkpoint-{large}")
        owners = {name: int(loaded[name][0]) for name in COUNTERS}
        owners["rng"] = owner_of(loaded["rng"])
        answers.put((large, rank, owners))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__, "with", RANKS, "ranks")
    answers = mp.get_context("spawn").SimpleQueue()
    mp.start_processes(work, (answers,), nprocs=RANKS)
    seen = {}
    for _ in range(2 * RANKS):
        large, rank, owners = answers.get()
        seen[large, rank] = owners
    for large, rank in sorted(seen):
        print(f"{'with   ' if large else 'without'} a large tensor: rank {rank} loads the values of ranks {seen[large, rank]}")
    print("belief: one rank's values in a row: its own, or those of rank 0")
    holds = True
    for large in (False, True):
        for rank in range(RANKS):
            holds = holds and seen[large, rank] == seen[large, 0]
        holds = holds and len(set(seen[large, 0].values())) > 1
    holds = holds and seen[False, 0] != seen[True, 0]
    print("HOLDS: every rank loads one mixture of the ranks' values" if holds else "no longer so")
    sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
