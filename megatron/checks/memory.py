"""What a checkpoint takes, and the memory of this machine; what a rank takes is for `megatron.planning.memory`."""

from typing import Any

from ..config import Config


def checkpoint_bytes(parameters: int, config: Config) -> float:
    """Of one checkpoint: fp32 weights and moments."""
    return 4.0 * parameters * (2 if config.optim.optimizer == "sgd" else 3)


def machine_bytes() -> float | None:
    """Memory of this machine that is free now, in bytes; None where the system does not tell."""
    found: list[Any] = []
    try:
        with open("/proc/meminfo", encoding="utf-8") as file:
            found += [1024.0 * int(line.split()[1]) for line in file if line.startswith("MemAvailable")]
        with open("/sys/fs/cgroup/memory.max", encoding="utf-8") as file:
            text = file.read().strip()
            found += [float(text)] if text.isdecimal() else []
    except OSError:
        pass
    return min(found, default=None)
