"""How many accelerators this machine has: `python -m megatron.ranks.accelerators`, for scripts.

Importing torch takes seconds. Where its build and the packages beside it can drive no accelerator, it is not imported.
"""

import runpy
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path


def may_be_there() -> bool:
    """Whether torch was built for accelerators (CUDA, ROCm, XPU), or a package plugs another kind into it (NPU)."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return True  # then importing it says what is wrong
    build = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return any(build.get(kind) for kind in ("cuda", "hip", "xpu")) or bool(entry_points(group="torch.backends"))


def count() -> int:
    """Accelerators that torch can use here; 0 on a machine with CPUs only."""
    if not may_be_there():
        return 0
    import torch

    from .device import available

    return torch.accelerator.device_count() if available() else 0


if __name__ == "__main__":
    print(count())
