"""Time several implementations in turn on the same processes, so that background load affects all of them equally."""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
Step = Callable[[], None]


def new_parser(about: str | None) -> argparse.ArgumentParser:
    """Return an argument parser whose --help prints `about` with its line breaks."""
    return argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)


def on_ranks(ranks: int) -> None:
    """Relaunch this script as `ranks` gloo processes with one thread each, unless RANK is already set."""
    if "RANK" in os.environ:
        return
    launch = [sys.executable, str(ROOT / "tools" / "launch.py"), "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    sys.exit(subprocess.run([*launch, *sys.argv], check=False, env=environment).returncode)


def alternate(steps: dict[str, Step], rounds: int, before: Step = lambda: None) -> dict[str, list[tuple[float, float]]]:
    """Time every contender's step once per round and return {contender: [(seconds, CPU-seconds), ...]}.

    CPU-seconds are summed over all ranks. An additional first round is a warm-up and is not counted.
    before: function to call before each step; its time is not counted.
    """
    import torch
    import torch.distributed as dist

    found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for round_ in range(rounds + 1):
        for name, step in steps.items():
            before()
            dist.barrier()
            begin, busy = time.perf_counter(), time.process_time()
            step()
            spent = torch.tensor([time.process_time() - busy], dtype=torch.float64)
            dist.barrier()
            took = time.perf_counter() - begin
            dist.all_reduce(spent)
            if round_:
                found[name].append((took, spent.item()))
    return found


def spread(values: list[float], form: str) -> str:
    """Format values as `median (lowest to highest)`, each number by the format specification `form`."""
    ordered = sorted(values)
    return f"{statistics.median(ordered):{form}} ({ordered[0]:{form}} to {ordered[-1]:{form}})"


def leave() -> None:
    """Flush standard output and exit at once, before gloo's threads can print errors at interpreter shutdown."""
    sys.stdout.flush()
    os._exit(0)
