"""Installation of the stand-in in this process: the library, and the functions of torch.cuda that need a CUDA build."""

import contextlib
import ctypes
import functools
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .build import torch_folder
from .waits import WAITS

DEVICES = 8  # as kDevices in stand_in.h
MEMORY = 80 << 30  # bytes
CAPABILITY = (9, 0)
NAME = "NVIDIA H100 80GB HBM3"

_alive: list[Any] = []  # ctypes callbacks must outlive the library's use of them


def install(library: Path, local_rank: int) -> None:
    """Make CUDA device `local_rank` the accelerator of this process. Call this before torch is imported."""
    assert "torch" not in sys.modules, "the library must register CUDA before torch looks for it"
    os.environ["DS_ACCELERATOR"] = "cuda"  # DeepSpeed would look for libraries of CUDA
    ctypes.CDLL(str(torch_folder() / "lib" / "libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL)
    loaded = ctypes.CDLL(str(library))
    loaded.stand_in_set_device(local_rank)
    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(lambda operation: WAITS.add(operation.decode()))
    loaded.stand_in_on_wait(callback)
    _alive.extend([loaded, callback])
    _patch_torch(local_rank)


class Event:
    """An event of a device whose work is complete as soon as it is queued."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def wait(self, *_: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        WAITS.add("Event.synchronize")

    def elapsed_time(self, _: Any) -> float:
        return 1.0  # milliseconds


class Stream:
    """A stream of a device whose work is complete as soon as it is queued."""

    cuda_stream = 0
    device: Any = None
    device_index = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, _: Any) -> None:
        pass

    def wait_event(self, _: Any) -> None:
        pass

    def record_event(self, *_: Any) -> Event:
        return Event()

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        WAITS.add("Stream.synchronize")

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: Any) -> None:
        pass


def _patch_torch(local_rank: int) -> None:
    """Replace what the CPU build of torch lacks. Random numbers come from the CPU's generator."""
    import torch
    import torch.cuda.nccl

    Stream.device = torch.device("cuda", local_rank)
    Stream.device_index = local_rank
    torch.Event = Event  # type: ignore[misc, assignment]
    torch.Stream = Stream  # type: ignore[misc, assignment]
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]
    for name, value in _accelerator_functions(local_rank).items():
        setattr(torch.accelerator, name, value)
    for name, value in _cuda_functions(local_rank).items():
        setattr(torch.cuda, name, value)
    torch.cuda.nvtx.range_push = lambda *_: None
    torch.cuda.nvtx.range_pop = lambda *_: None
    torch.cuda.nccl.version = lambda: (2, 29, 7)  # for messages of torch about errors of collectives
    torch.get_device_module = functools.cache(lambda *_: torch.cuda)  # torch.compile reads its `__wrapped__`
    _patch_generators()
    _patch_storage()


def _accelerator_functions(local_rank: int) -> dict[str, Any]:
    """Return functions of torch.accelerator, by name."""
    return {
        "is_available": lambda: True,
        "device_count": lambda: DEVICES,
        "current_device_index": lambda: local_rank,
        "set_device_index": lambda _: None,
        "current_stream": lambda *_: Stream(),
        "synchronize": lambda *_: WAITS.add("synchronize"),
        "memory_stats": lambda *_: {},
        "max_memory_allocated": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: WAITS.add("empty_cache"),
    }


def _cuda_functions(local_rank: int) -> dict[str, Any]:
    """Return functions of torch.cuda, by name."""
    import torch

    properties = SimpleNamespace(
        name=NAME, total_memory=MEMORY, multi_processor_count=132, major=CAPABILITY[0], minor=CAPABILITY[1]
    )
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: DEVICES,
        "current_device": lambda: local_rank,
        "set_device": lambda _: None,
        "device": lambda _: contextlib.nullcontext(),
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda *_: Stream(),
        "default_stream": lambda *_: Stream(),
        "stream": lambda _: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda *_, **__: True,
        "get_device_capability": lambda *_: CAPABILITY,
        "get_device_name": lambda *_: NAME,
        "get_device_properties": lambda *_: properties,
        "mem_get_info": lambda *_: (MEMORY, MEMORY),
        "memory_stats": lambda *_: {},
        "synchronize": lambda *_: WAITS.add("synchronize"),
        "empty_cache": lambda: WAITS.add("empty_cache"),
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "initial_seed": lambda: torch.initial_seed(),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(int(seed)),
        "manual_seed_all": lambda _: None,
        "_lazy_init": lambda: None,
    }
    for kind in ("memory_allocated", "memory_reserved", "memory_cached"):
        functions[kind] = lambda *_: 0
        functions[f"max_{kind}"] = lambda *_: 0
        functions[f"reset_max_{kind}"] = lambda *_: None
    functions["reset_peak_memory_stats"] = lambda *_: None
    return functions


def _patch_storage() -> None:
    import torch

    resize_on_host = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: int) -> Any:
        if storage.device.type != "cuda":
            return resize_on_host(storage, size)
        tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        torch.ops.stand_in.resize_storage(tensor, size)
        return storage

    torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment]


def _patch_generators() -> None:
    """Give generators of the CPU to code that asks for generators of the device."""
    import torch

    cpu_generator = torch.Generator

    class Kind(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, cpu_generator)

    class Generator(metaclass=Kind):
        def __new__(cls, device: Any = None) -> Any:
            return cpu_generator()

    torch.Generator = Generator  # type: ignore[misc, assignment]

    def manual_seed(seed: int) -> Any:
        return torch.default_generator.manual_seed(int(seed))

    torch.manual_seed = manual_seed
    torch.random.manual_seed = manual_seed
