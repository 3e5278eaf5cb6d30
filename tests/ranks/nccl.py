"""NCCL's message order and a device's asynchronous execution, emulated on CPU ranks over gloo.

The emulation differs from gloo in five ways. (1) Messages of a process group form one queue, in the order of this
rank's calls. (2) Calls return at once: a message reads and writes memory later, and `wait` only makes later tensor
operations wait. (3) If communicators are created lazily, the first message between two ranks blocks the calling
rank until the peer issues its own first message. (4) With one hardware queue, computations and messages start in
the order of the calls. (5) If kernels are loaded lazily, the first use of a kernel waits for all earlier work,
messages included.
"""

import functools
import inspect
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

MESSAGES = ("isend", "irecv", "send", "recv")
COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "all_gather_single",
    "reduce_scatter_single",
)


class Work:
    """A point-to-point message or a collective, with torch's Work interface.

    started: event that is set when the operation begins, after all earlier operations in its queue. done: event that is
    set when the operation ends.
    """

    def __init__(self, device: "Device") -> None:
        self.device, self.error = device, None
        self.started, self.done = threading.Event(), threading.Event()

    def wait(self, timeout: Any = None) -> bool:
        self.device.pending.append(self)
        return True

    def is_completed(self) -> bool:
        return self.done.is_set()


class Device:
    """The emulated device of one rank, with its message queues.

    pending: operations that the next computation waits for. loaded: kernels used so far. hosts: process groups for
    tensors in host memory, whose messages do not pass through the device.
    """

    def __init__(self, lazy: bool, one_hardware_queue: bool, loading: bool) -> None:
        self.lazy, self.one_hardware_queue, self.loading = lazy, one_hardware_queue, loading
        self.loaded: set[Any] = set()
        self.hosts: set[Any] = set()
        self._all: list[Work] = []
        self.pending: list[Work] = []
        self._asked: Work | None = None
        self._queues: dict[Any, queue.SimpleQueue[Any]] = {}
        self._met: set[Any] = set()
        self.lateness = 0.002  # longest delay of a message, in seconds
        self._random = random.Random(dist.get_rank())

    def ask(self, stream: Any, operation: Callable[[], Any]) -> Work:
        work, after = Work(self), list(self.pending)
        first, self._asked = self._asked if self.one_hardware_queue else None, work
        self._all = [*(each for each in self._all if not each.done.is_set()), work]
        if stream not in self._queues:
            self._queues[stream] = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(self._queues[stream],), daemon=True).start()
        self._queues[stream].put(
            (work, after, first, self._random.uniform(self.lateness / 2, self.lateness), operation)
        )
        return work

    def _serve(self, line: "queue.SimpleQueue[Any]") -> None:
        while True:
            work, after, first, lateness, operation = line.get()
            for each in after:
                each.done.wait()
            if first:
                first.started.wait()
            work.started.set()
            time.sleep(lateness)
            try:
                operation()
            except Exception as error:
                work.error = error
            work.done.set()

    def compute(self) -> None:
        """Wait for the operations in `pending`, as a computation on a CUDA stream would."""
        for each in self.pending:
            each.done.wait()
            if each.error:
                raise each.error
        self.pending.clear()
        if self.one_hardware_queue and self._asked:
            self._asked.started.wait()

    def load(self, kernel: Any) -> None:
        """Wait for all earlier work if kernels are loaded lazily and `kernel` was not used before."""
        if self.loading and kernel not in self.loaded:
            self.loaded.add(kernel)
            self.finish()

    def finish(self) -> None:
        """Wait for all operations issued so far, messages included."""
        for each in self._all:
            each.done.wait()

    def meet(self, group: Any, peer: int) -> None:
        """Before this rank's first message to `peer` in `group`, block until the peer begins its first message, too."""
        if not self.lazy or (group, peer) in self._met:
            return
        self._met.add((group, peer))
        store, me, name = dist.distributed_c10d._get_default_store(), dist.get_rank(), group.group_name
        store.set(f"nccl/{name}/{me}/{peer}", "1")
        store.wait([f"nccl/{name}/{peer}/{me}"])


class _Computing(TorchDispatchMode):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._device.load(func)
        self._device.compute()
        return func(*args, **(kwargs or {}))


def _message(device: Device, raw: Callable[..., Any], waits: bool) -> Callable[..., Any]:
    def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(raw).bind(tensor, *args, **kwargs)
        group = given.arguments["group"] = given.arguments.get("group") or dist.group.WORLD
        peer = given.arguments["src" if "src" in given.arguments else "dst"]
        if group in device.hosts:
            sent = raw(*given.args, **given.kwargs)
            return sent.wait() if waits else sent
        device.meet(group, peer)
        stream = (group, peer) if device.lazy else group
        work = device.ask(stream, lambda: raw(*given.args, **given.kwargs).wait())
        return (work.wait(), device.compute()) if waits else work

    return call


def _collective(device: Device, raw: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(raw)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(raw).bind(*args, **kwargs)
        given.apply_defaults()
        if given.arguments["group"] in device.hosts:
            return raw(*args, **kwargs)
        asynchronous, given.arguments["async_op"] = given.arguments["async_op"], False
        work = device.ask(given.arguments["group"] or dist.group.WORLD, lambda: raw(*given.args, **given.kwargs))
        return work if asynchronous else (work.wait(), None)[1]

    return call


@contextmanager
def nccl(rules: str) -> Iterator[Device]:
    """Emulate NCCL on top of gloo, and yield this rank's emulated device.

    rules: "eager" or "lazy", which says when communicators are created; "one queue" (CUDA_DEVICE_MAX_CONNECTIONS=1) or
    "loading" (CUDA_MODULE_LOADING=LAZY), both with eager communicators.
    """
    device = Device(rules == "lazy", rules == "one queue", rules == "loading")
    homes = (dist, dist.distributed_c10d)
    raw = {name: getattr(dist, name) for name in (*MESSAGES, *COLLECTIVES)}
    put = {name: _collective(device, raw[name]) for name in COLLECTIVES}
    for name in MESSAGES:
        start = raw[name if name.startswith("i") else "i" + name]
        put[name] = _message(device, start, waits=not name.startswith("i"))
    to_list = torch.Tensor.tolist

    def read(tensor: torch.Tensor) -> Any:
        device.compute()
        return to_list(tensor)

    try:
        for name, function in put.items():
            for home in homes:
                setattr(home, name, function)
        torch.Tensor.tolist = read  # type: ignore[method-assign]
        with _Computing(device):
            yield device
            device.compute()
    finally:
        torch.Tensor.tolist = to_list  # type: ignore[method-assign]
        for name, function in raw.items():
            for home in homes:
                setattr(home, name, function)
