"""Choose the faster library for fp32 matmuls on a CPU, torch's BLAS or oneDNN, by a short benchmark once per machine.

Torch's builds come with MKL, whose best kernels are for Intel CPUs only. On other CPUs, oneDNN may be faster, by a
factor that varies between CPUs.
"""

import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from .. import mpu
from .._torch import onednn_linear
from ..atomic import own_folder, write_text
from ..config.fields import ConfigError
from ..json_text import read_json
from .objects import from_rank_0
from .rank_0 import is_rank_0

ROWS, WIDTH, ROUNDS = 256, 512, 15
WORTH = 1.1  # minimum speedup of oneDNN; below it, torch's own BLAS is used, as in any torch program


def by_onednn(wanted: str, device: torch.device) -> bool:
    """Return whether `--cpu-matmul`, whose value is `wanted`, selects oneDNN. The result is the same on all ranks.

    Raises ConfigError if onednn is wanted, but torch has no oneDNN.
    """
    there = mpu.onednn_is_there()
    if wanted == "onednn" and not there:
        raise ConfigError("--cpu-matmul onednn: this build of torch has no oneDNN; use --cpu-matmul torch")
    if wanted != "auto" or device.type != "cpu" or not there:
        return wanted == "onednn"
    worth = is_rank_0() and remembered(cache_file(), this_cpu(), speedup) >= WORTH
    return from_rank_0(worth)


def speedup() -> float:
    """Return oneDNN's speedup over torch's BLAS: the median over several rounds, each of which times both libraries."""
    x = torch.ones(ROWS, WIDTH)
    weight = torch.ones(WIDTH, WIDTH)
    ratios = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        middle = time.perf_counter()
        onednn_linear(x, weight, None)
        ratios.append((middle - begin) / (time.perf_counter() - middle))
    return statistics.median(ratios[1:])


def remembered(path: Path, key: str, measure: Callable[[], float]) -> float:
    """Return the measurement for `key` from the cache file `path`; if it is missing, measure and cache it.

    If the cache file cannot be read or written, the only cost is a new measurement.
    """
    known: dict[str, float] = {}
    with contextlib.suppress(OSError, ValueError):
        found = read_json(path)
        if isinstance(found, dict):
            known = found
    if not isinstance(known.get(key), (int, float)):
        known[key] = measure()
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(known, indent=1))
    return float(known[key])


def cache_file() -> Path:
    """Return the path of the cache file: in the user's cache folder or, without a home directory, a temporary one."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        try:
            folder = own_folder("megatron-cache")
        except ValueError:
            folder = Path(os.devnull)  # no folder is usable: cache reads and writes fail, so each run measures again
    return folder / "megatron-cpu-matmul.json"


def this_cpu() -> str:
    """Return a cache key of CPU, torch version and threads, since different machines may share the cache file."""
    name = "an unknown CPU"
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        if models:
            name = models[0]
    capability = torch.backends.cpu.get_cpu_capability()
    threads = torch.get_num_threads()
    return f"{name}, {capability}, torch {torch.__version__}, {threads} threads"
