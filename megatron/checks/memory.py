"""What weights, gradients and optimizer take: a closed form, without activations."""

from dataclasses import replace
from typing import Any

from ..config import Config

BYTES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}


def count(config: Config) -> int:
    """Parameters of the whole model of these settings, exactly: each layer is built without memory. Needs a vocabulary size."""
    import torch

    from ..model.layers import count_parameters
    from ..tasks import task_of

    alone = replace(config.parallel, model_parallel_size=1, pipe_parallel_size=0, pipeline_schedule="1f1b", virtual_pipeline_size=1, context_parallel_size=1, pipeline_extra_warmup=0)  # fmt: skip
    with torch.device("meta"):
        return count_parameters(task_of(config).model(replace(config, parallel=alone), None))


def rank_bytes(parameters: int, config: Config, precision: str, zero: int, ranks: int) -> dict[str, float]:
    """Bytes of a rank by kind, as if layers were cut evenly. ZeRO 1 shares the optimizer out over replicas, 2 gradients, too, 3 weights (Rajbhandari et al. 2020)."""
    p = config.parallel
    held = parameters / (p.stages * p.model_parallel_size)
    replicas = max(ranks // (p.stages * p.model_parallel_size), 1)
    mixed = precision in ("fp16", "bf16")
    width = BYTES[precision]
    moments = (1 if config.optim.optimizer == "sgd" else 2) * max(width, 4)
    kinds = {
        "weights": (width, 3),
        "gradients": (max(width, 4), 2),
        "optimizer": (moments + (4 if mixed else 0), 1),
    }
    return {kind: held * each / (replicas if zero >= stage else 1) for kind, (each, stage) in kinds.items()}


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
