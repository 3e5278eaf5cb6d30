"""In a step of a pipeline, the host waits for its device only once.

A stand-in device on the CPU counts the waits: its tensors are CPU tensors that were created for `DEVICE` or computed
from such tensors.
"""

import collections
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tds
from tests.support import on_ranks

DEVICE = torch.device("cpu", 0)  # tensors on the host have the device "cpu", without an index
WIDTH, MICROS = 4, 6


class Waits(TorchDispatchMode):
    """Counter of the host's waits for the stand-in device: each read of a value, and each blocking copy.

    where: for each wait, the line of code of tds.
    """

    def __init__(self) -> None:
        super().__init__()
        self._on_device: set[int] = set()
        self._alive: list[Any] = []  # keeps storages alive, so that their addresses stay unique
        self.where: collections.Counter[str] = collections.Counter()

    def put(self, tensor: Tensor) -> Tensor:
        """Mark a tensor as one of the device."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._on_device:
            self._on_device.add(storage._cdata)
            self._alive.append(storage)
        return tensor

    def has(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata in self._on_device

    def wait(self, what: str) -> None:
        frames = [each for each in traceback.extract_stack() if "/tds/" in each.filename]
        self.where[f"{what} in {frames[-1].name if frames else 'torch'}"] += 1

    def _blocks(self, name: str, args: Any, kwargs: Any) -> bool:
        """Return whether a device's host waits in this operation."""
        if name == "_local_scalar_dense":
            return self.has(args[0])
        if name == "copy_":
            blocking = not (len(args) > 2 and args[2])
            return blocking and self.has(args[0]) != self.has(args[1])
        if name == "_to_copy" and "device" in kwargs:
            return not kwargs.get("non_blocking") and self.has(args[0]) != (kwargs["device"] == DEVICE)
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if self._blocks(name, args, kwargs):
            self.wait(name)
        result = func(*args, **kwargs)
        if kwargs.get("device") is None or name.endswith("_like"):
            on_device = any(self.has(each) for each in tree_leaves((args, kwargs)))
        else:
            on_device = kwargs["device"] == DEVICE
        for each in tree_leaves(result):
            if on_device and isinstance(each, Tensor):
                self.put(each)
        return result


@contextmanager
def counted() -> Iterator[Waits]:
    """Count waits in this block, in which `DEVICE` is an accelerator."""
    waits, tensor_of, take = Waits(), torch.tensor, tds.memory.BufferPool.take

    def reading(name: str) -> Callable[[Tensor], Any]:
        function = getattr(Tensor, name)

        def read(tensor: Tensor) -> Any:
            if waits.has(tensor):
                waits.wait(name)
            return function(tensor)

        return read

    def make(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        made = tensor_of(data, *args, **kwargs)
        if device == DEVICE:
            waits.wait("torch.tensor")
            waits.put(made)
        return made

    with pytest.MonkeyPatch.context() as patch:
        for name in ("tolist", "cpu"):
            patch.setattr(Tensor, name, reading(name))
        patch.setattr(torch, "tensor", make)
        patch.setattr(tds.memory.BufferPool, "take", lambda pool, size: waits.put(take(pool, size)))
        patch.setattr(tds.losses, "to_device", lambda values, _: waits.put(tensor_of(values, dtype=torch.float64)))
        for name, module in list(sys.modules.items()):
            if name.startswith("tds.") and hasattr(module, "this_device"):
                patch.setattr(module, "this_device", lambda: DEVICE)
        with waits:
            yield waits


class Sums:
    """A squared error summed over targets."""

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs - labels).square().sum()

    def count_targets(self, labels: Tensor) -> int:
        return labels.numel()


def _move(engine: Any, waits: Waits) -> None:
    """Mark the engine and its model as being on `DEVICE`."""
    engine.device = engine._losses.device = DEVICE
    for each in [*engine.module.parameters(), *engine.module.buffers()]:
        waits.put(each.data)
    for bucket in engine.optimizer.buckets if engine.distributed else ():
        for each in (bucket.weights, bucket.grads, bucket.share.data):
            waits.put(each)


def _steps(stages: int, pipeline: dict[str, Any], kind: str) -> list[dict[str, int]]:
    """Train five steps, and return the waits of each.

    kind: some of the words "distributed", "bf16", "counts", "dynamic" and "tied" (the first and the last layer).
    """
    torch.manual_seed(0)
    chunks = 2 if pipeline["schedule"] == "interleaved" else 1
    layers: list[Any] = [nn.Linear(WIDTH, WIDTH) for _ in range(stages * chunks)]
    if "tied" in kind:
        for position in (0, -1):
            layers[position] = tds.pipe.TiedLayerSpec("weight", nn.Linear, WIDTH, WIDTH)
    net = tds.PipelineModule(
        layers, num_stages=stages, chunks=chunks,
        loss_fn=Sums() if "counts" in kind else nn.functional.mse_loss, dynamic_shape="dynamic" in kind,
    )  # fmt: skip
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": MICROS, "gradient_clipping": 0.5,
        "pipeline": {**pipeline, "timeout": 30},
    }  # fmt: skip
    optimizer: Any = torch.optim.AdamW(net.parameters(), fused=True)
    if "distributed" in kind:
        optimizer = tds.DistributedOptimizer(optimizer)
        config |= {"zero_optimization": {"stage": 1}, "bf16": {"enabled": "bf16" in kind}}
    engine = tds.initialize(model=net, optimizer=optimizer, config=config)[0]
    dtype = torch.bfloat16 if "bf16" in kind else torch.float32
    found = []
    with counted() as waits:
        _move(engine, waits)
        for step in range(5):
            waits.where.clear()
            generator = torch.Generator().manual_seed(step)
            engine.train_batch(
                iter([tuple(torch.randn(2, WIDTH, generator=generator).to(dtype) for _ in "xy") for _ in range(MICROS)])
            )
            found.append(dict(waits.where))
    return found


CASES = [
    (2, 1, {"schedule": "1f1b"}, "plain"),
    (2, 2, {"schedule": "1f1b"}, "plain, counts"),
    (3, 1, {"schedule": "zb-h1"}, "plain, counts"),
    (2, 1, {"schedule": "1f1b"}, "plain, dynamic"),
    (2, 1, {"schedule": "1f1b"}, "plain, tied"),
    (2, 2, {"schedule": "1f1b"}, "distributed, bf16, tied"),
    (2, 1, {"schedule": "interleaved"}, "distributed, counts"),
    (2, 2, {"schedule": "1f1b"}, "distributed, bf16, counts"),
    (1, 2, {"schedule": "1f1b"}, "distributed, bf16"),
]


@pytest.mark.parametrize(("stages", "replicas", "pipeline", "kind"), CASES, ids=str)
def test_the_host_waits_once_in_a_step(stages: int, replicas: int, pipeline: dict[str, Any], kind: str) -> None:
    for steps in on_ranks(stages * replicas, _steps, stages, pipeline, kind):
        assert [sum(step.values()) for step in steps[1:]] == [1] * 4, steps


def _waits_of(operation: str) -> int:
    with counted() as waits:
        there, here = torch.zeros(2, device=DEVICE), torch.ones(2)
        operations: dict[str, Callable[[], Any]] = {
            "item": lambda: there.sum().item(),
            "bool": lambda: bool(there[0] > 0),
            "tolist": lambda: (there + 1).tolist(),
            "torch.tensor": lambda: torch.tensor([1.0], device=DEVICE),
            "to the device": lambda: here.to(DEVICE),
            "cpu": lambda: there.cpu(),
            "copy_": lambda: there[:1].copy_(here[:1]),
            "an assignment": lambda: there.__setitem__(slice(0, 1), torch.tensor([2.0])),
            "to the device, without blocking": lambda: here.to(DEVICE, non_blocking=True),
            "computation": lambda: torch.full((), 2.0, device=DEVICE) + there.square().sum(),
            "tolist on the host": lambda: here.tolist(),
        }
        operations[operation]()
        return waits.where.total()


@pytest.mark.parametrize(
    ("operation", "expected"),
    [("item", 1), ("bool", 1), ("tolist", 1), ("torch.tensor", 1), ("to the device", 1), ("cpu", 1)]
    + [("copy_", 1), ("an assignment", 1), ("to the device, without blocking", 0), ("computation", 0)]
    + [("tolist on the host", 0)],
)
def test_the_stand_in_counts_what_waits_for_a_device(operation: str, expected: int) -> None:
    assert _waits_of(operation) == expected
