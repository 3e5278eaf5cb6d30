"""Uses of the stand-in with known results: `python -m tests.cuda_stand_in.probes LIBRARY` prints what it finds as JSON.

The tests compare: for each operation, whether the host waits; which mistakes raise or are refused.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def waits_by_operation() -> dict[str, int]:
    """Return the number of waits of each operation."""
    import torch
    import torch.nn.functional as F

    from .waits import WAITS

    there = torch.arange(4.0, device="cuda")
    here = torch.ones(4)
    pinned = torch.ones(4).pin_memory()
    repeats = torch.tensor([1, 2, 0, 1], device="cuda")
    operations: dict[str, Callable[[], Any]] = {
        "item": lambda: there.sum().item(),
        "bool": lambda: bool(there[0] > 0),
        "tolist": lambda: there.tolist(),
        "nonzero": lambda: there.nonzero(),
        "mask": lambda: there[there > 1],
        "assignment of a number by a mask": lambda: there.__setitem__(there > 9, 0.0),
        "assignment of values by a mask": lambda: there.__setitem__(there > 2, there[3:]),
        "indices on the host": lambda: there[torch.tensor([1, 2])],
        "bincount": lambda: torch.bincount(repeats),
        "repeat_interleave": lambda: there.repeat_interleave(repeats),
        "repeat_interleave of a known size": lambda: there.repeat_interleave(repeats, output_size=4),
        "to the device": lambda: here.to("cuda"),
        "to the device, without blocking": lambda: pinned.to("cuda", non_blocking=True),
        "to the host": lambda: there.cpu(),
        "to pinned memory, without blocking": lambda: pinned.copy_(there, non_blocking=True),
        "to other memory, without blocking": lambda: here.copy_(there, non_blocking=True),
        "computation": lambda: F.layer_norm(there @ there.outer(there), (4,)).sum(),
    }
    counts = {}
    for name, operation in operations.items():
        with WAITS.step():
            operation()
        counts[name] = sum(WAITS.steps[-1].values())
    return counts


def gradient() -> tuple[str, list[float]]:
    """Return the device and the values of a gradient."""
    import torch

    weight = torch.tensor([1.0, 2.0], device="cuda", requires_grad=True)
    (weight * weight).sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    return str(weight.grad.device), weight.grad.tolist()


def error_of_mixed_devices() -> str:
    """Return the error of an operation on tensors of two devices."""
    import torch

    try:
        torch.ones(2, device="cuda") + torch.ones(2)
    except RuntimeError as error:
        return str(error)
    return ""


def refused_calls() -> list[str]:
    """Return why NCCL would refuse calls in a world of one rank, each without the line of code."""
    import torch
    import torch.distributed as dist

    from .nccl import RECORD

    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    hosts = dist.new_group([0], backend="gloo")
    backends = dist.get_backend(), dist.get_backend(hosts)
    assert backends == ("nccl", "gloo")
    dist.all_reduce(torch.ones(2, device="cuda"))
    dist.all_reduce(torch.ones(2), group=hosts)
    assert not RECORD.refused
    dist.all_reduce(torch.ones(2))
    dist.all_reduce(torch.ones(2, device="cuda"), group=hosts)
    dist.broadcast(torch.ones(2, 3, device="cuda").t(), 0)
    with contextlib.suppress(RuntimeError):  # gloo refuses it, too
        dist.broadcast(torch.ones(2, device="cuda").short(), 0)
    dist.all_reduce(torch.ones(2, device="cuda").int(), op=dist.ReduceOp.BOR)
    return [sentence.rpartition(": ")[2] for sentence in RECORD.refused]


def main() -> None:
    os.environ["LOCAL_RANK"] = "1"
    from .worker import install

    install(Path(sys.argv[1]))
    found = {
        "waits": waits_by_operation(),
        "gradient": gradient(),
        "mixed": error_of_mixed_devices(),
        "refused": refused_calls(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
