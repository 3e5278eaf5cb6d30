"""Count this machine's ranks and accelerators: `python -m megatron.ranks.accelerators` prints the latter for scripts.

Importing torch takes seconds. The import is skipped if neither torch's build nor an installed package supports
accelerators.
"""

import os
import runpy
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path


def ranks_on_machine(world_size: int) -> int | None:
    """Return the number of ranks on this machine, which torchrun and DeepSpeed's launcher set; None if unknown.

    world_size: number of ranks of the whole run.
    """
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    if local_world_size:
        return int(local_world_size)
    return 1 if world_size == 1 else None


def may_have_accelerator() -> bool:
    """Return whether torch was built for accelerators (CUDA, ROCm, XPU) or a package adds a backend (NPU)."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return True  # torch is missing or broken; its import in `count_accelerators` will raise an error that says so
    build_info = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    # version.py of a CPU build sets these names to None.
    if any(map(build_info.get, ("cuda", "hip", "xpu"))):
        return True
    return bool(entry_points(group="torch.backends"))


def count_accelerators() -> int:
    """Return the number of accelerators that torch can use on this machine."""
    if not may_have_accelerator():
        return 0
    import torch

    from .device import has_accelerator

    return torch.accelerator.device_count() if has_accelerator() else 0


if __name__ == "__main__":
    print(count_accelerators())
