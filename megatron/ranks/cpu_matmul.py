"""Choose the faster library for fp32 matmuls on a CPU, torch's BLAS or oneDNN, by a short benchmark once per machine.

Torch's builds come with MKL, whose best kernels are for Intel CPUs only. On other CPUs oneDNN may be faster, by
a factor that varies from one CPU to the next.
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
from .objects import from_rank_0
from .rank_0 import is_rank_0

ROWS, WIDTH, ROUNDS = 256, 512, 15
WORTH = 1.1  # minimum speedup of oneDNN; with less, torch's own BLAS is kept, the default of torch programs


def by_onednn(wanted: str, device: torch.device) -> bool:
    """Return whether `--cpu-matmul` selects oneDNN, alike on all ranks. Raises ConfigError if torch has no oneDNN."""
    if wanted == "onednn" and not mpu.onednn_is_there():
        raise ConfigError("--cpu-matmul onednn: this build of torch has no oneDNN; use --cpu-matmul torch")
    if wanted != "auto" or device.type != "cpu" or not mpu.onednn_is_there():
        return wanted == "onednn"
    return from_rank_0(is_rank_0() and remembered(cache_file(), this_cpu(), speedup) >= WORTH)


def speedup() -> float:
    """Return oneDNN's speedup over torch's BLAS: the median over rounds that time both."""
    x, weight = torch.ones(ROWS, WIDTH), torch.ones(WIDTH, WIDTH)
    ratios = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        middle = time.perf_counter()
        onednn_linear(x, weight, None)
        ratios.append((middle - begin) / (time.perf_counter() - middle))
    return statistics.median(ratios[1:])


def remembered(path: Path, key: str, measure: Callable[[], float]) -> float:
    """Return the cached measurement for `key`; measure and cache it if there is none.

    A cache file that cannot be read or written only costs a new measurement.
    """
    known: dict[str, float] = {}
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        known = found if isinstance(found, dict) else {}
    if not isinstance(known.get(key), (int, float)):
        known[key] = measure()
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(known, indent=1))
    return float(known[key])


def cache_file() -> Path:
    """Return the cache file: in the user's cache folder, or among the temporary files if there is no home directory."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        try:
            folder = own_folder("megatron-cache")
        except ValueError:
            folder = Path(os.devnull)  # reads and writes both fail, so each run measures again
    return folder / "megatron-cpu-matmul.json"


def this_cpu() -> str:
    """Return a cache key: CPU, torch version and threads, as several machines may share a home directory."""
    name = "an unknown CPU"
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    capability, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    return f"{name}, {capability}, torch {torch.__version__}, {threads} threads"
