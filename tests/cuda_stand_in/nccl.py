"""torch.distributed by NCCL's rules: gloo carries the data, each call is checked, and the order of calls is recorded.

Groups that the code creates with the backend gloo are groups of hosts, for which NCCL's rules do not hold.
"""

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .waits import WAITS, caller

# Of `getNcclDataType` in torch/csrc/distributed/c10d/NCCLUtils.cpp (2.13).
DTYPES = {
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64,
    torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
}  # fmt: skip
# NCCL has no bitwise operations (`getNcclReduceOp` in torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp).
REFUSED_OPERATIONS = {dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR}
COLLECTIVES = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "all_gather_single", "gather",
    "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "scatter", "all_to_all", "all_to_all_single",
)  # fmt: skip
# Collectives of which all ranks pass equal sizes.
OF_EQUAL_SIZES = {"all_reduce", "reduce", "broadcast", "all_gather_into_tensor", "all_gather_single"}
POINT_TO_POINT = "isend", "irecv", "send", "recv"
# NCCL sends objects as tensors on the device, and the host reads their sizes; a barrier waits for the device, too.
WAITING = (
    "barrier", "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
)  # fmt: skip

c10d: Any = dist.distributed_c10d


class Record:
    """The calls of this rank in groups of NCCL, and those that NCCL would refuse.

    events: in order, ["call", number, group, ranks, operations, place] for the start of a call, and ["wait", number]
        when the current stream waits for it. An operation is [name, peer or None, signature].
    refused: sentences.
    """

    def __init__(self) -> None:
        self.events: list[list[Any]] = []
        self.refused: dict[str, int] = {}
        self._calls = 0

    def call(self, group: Any, operations: list[list[Any]]) -> int:
        """Record the start of a call, and return its number."""
        self._calls += 1
        ranks = dist.get_process_group_ranks(group)
        self.events.append(["call", self._calls, group.group_name, ranks, operations, caller()])
        return self._calls

    def wait(self, number: int) -> None:
        """Record that the current stream waits for the end of call `number`."""
        self.events.append(["wait", number])

    def refuse(self, name: str, reason: str) -> None:
        """Record a call that NCCL would refuse."""
        sentence = f"{name} at {caller()}: {reason}"
        self.refused[sentence] = self.refused.get(sentence, 0) + 1


class Handle:
    """Handle of a call; records when it is awaited."""

    def __init__(self, work: Any, number: int) -> None:
        self._work = work
        self._number = number

    def wait(self, *args: Any) -> Any:
        RECORD.wait(self._number)
        return self._work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


RECORD = Record()
_host_groups: list[Any] = []
_inside = threading.local()  # .depth: number of patched calls around the current one


def install() -> None:
    """Patch torch.distributed in this process."""
    for name in COLLECTIVES:
        _replace(name, functools.partial(_checked, _call_collective))
    for name in POINT_TO_POINT:
        _replace(name, functools.partial(_checked, _call_point_to_point))
    for name in WAITING:
        _replace(name, _waiting)
    _replace("batch_isend_irecv", _batched)
    _replace("init_process_group", _with_gloo)
    _replace("new_group", _with_marked_hosts)
    _replace("get_backend", _reporting_nccl)


def _replace(name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace the function `name` of torch.distributed by `wrap(function)`, if this release has it."""
    function = getattr(c10d, name, None)
    if function is None:
        return
    wrapped = functools.wraps(function)(wrap(function))
    for module in (c10d, dist):
        if hasattr(module, name):
            setattr(module, name, wrapped)


def _is_of_hosts(group: Any) -> bool:
    return any(group is each for each in _host_groups)


def _default(group: Any) -> Any:
    return c10d._get_default_group() if group is None else group


def _depth() -> int:
    return getattr(_inside, "depth", 0)


def _call_inside(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function of torch, whose own calls of patched functions are not recorded."""
    _inside.depth = _depth() + 1
    try:
        return function(*args, **kwargs)
    finally:
        _inside.depth -= 1


def _check(name: str, tensor: Tensor, group: Any) -> None:
    """Record what NCCL, or gloo for a group of hosts, would refuse about a tensor."""
    if _is_of_hosts(group):
        if tensor.is_cuda:
            RECORD.refuse(name, "a tensor on the device in a group of hosts")
        return
    if not tensor.is_cuda:
        RECORD.refuse(name, "a tensor of the CPU in a group of NCCL")
    if tensor.layout is not torch.strided:
        RECORD.refuse(name, "a sparse tensor")
    elif not tensor.is_contiguous():
        RECORD.refuse(name, f"a tensor {list(tensor.shape)} that is not contiguous")
    if tensor.dtype not in DTYPES:
        RECORD.refuse(name, f"{tensor.dtype}")


def _on_host(value: Any) -> Any:
    """Return a tensor of the CPU with the same memory; gloo cannot read from a stand-in."""
    if isinstance(value, (list, tuple)):
        return [_on_host(each) for each in value]
    if isinstance(value, Tensor) and value.is_cuda:
        return torch.ops.stand_in.host_view(value.detach())
    return value


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors of an argument."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [each for each in value if isinstance(each, Tensor)]
    return []


def _checked(call: Any, function: Any) -> Any:
    """Return `function`, which checks the tensors, and records its call in the way of `call`."""
    signature = inspect.signature(function)

    def run(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        arguments = bound.arguments
        group = _default(arguments.get("group"))
        is_outer = not _depth()
        tensors: list[Tensor] = []
        for name, value in arguments.items():
            found = _tensors(value)
            tensors += found
            if found:
                arguments[name] = _on_host(value)
        if is_outer:
            for tensor in tensors:
                _check(function.__name__, tensor, group)
        if not is_outer or _is_of_hosts(group):
            return _call_inside(function, *bound.args, **bound.kwargs)
        return call(function, bound, group, tensors)

    return run


def _call_collective(function: Any, bound: Any, group: Any, tensors: list[Tensor]) -> Any:
    """Call a collective, and record it."""
    name = function.__name__
    if bound.arguments.get("op") in REFUSED_OPERATIONS:
        RECORD.refuse(name, f"{bound.arguments['op']}")
    sizes = [tensor.numel() for tensor in tensors] if name in OF_EQUAL_SIZES else []
    dtypes = {str(tensor.dtype) for tensor in tensors}
    number = RECORD.call(group, [[name, None, f"{sorted(dtypes)} {sizes}"]])
    work = _call_inside(function, *bound.args, **bound.kwargs)
    if work is not None:
        return Handle(work, number)
    RECORD.wait(number)
    return None


def _operation(name: str, tensor: Tensor, peer: int) -> list[Any]:
    return [name.removeprefix("i"), peer, f"{tensor.dtype} {tensor.numel()}"]


def _call_point_to_point(function: Any, bound: Any, group: Any, tensors: list[Tensor]) -> Any:
    """Call a send or a receive, and record it."""
    arguments = bound.arguments
    peer = arguments.get("dst", arguments.get("src"))
    if peer is None:
        peer = dist.get_global_rank(group, arguments.get("group_dst", arguments.get("group_src")))
    number = RECORD.call(group, [_operation(function.__name__, tensors[0], peer)])
    work = _call_inside(function, *bound.args, **bound.kwargs)
    if function.__name__ in ("isend", "irecv"):
        return Handle(work, number)
    RECORD.wait(number)
    return work


def _batched(function: Any) -> Any:
    """Return batch_isend_irecv, recorded as one call."""

    def run(p2p_op_list: Any) -> Any:
        group = p2p_op_list[0].group
        for each in p2p_op_list:
            _check(each.op.__name__, each.tensor, group)
        if _is_of_hosts(group):
            return _call_inside(function, p2p_op_list)
        operations = [_operation(each.op.__name__, each.tensor, each.peer) for each in p2p_op_list]
        number = RECORD.call(group, operations)
        works = _call_inside(function, p2p_op_list)
        return [Handle(work, number) for work in works]

    return run


def _waiting(function: Any) -> Any:
    """Return a collective for which the host waits."""
    signature = inspect.signature(function)

    def run(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_ids", None)  # which are for NCCL only
        group = _default(signature.bind(*args, **kwargs).arguments.get("group"))
        if _depth() or _is_of_hosts(group):
            return _call_inside(function, *args, **kwargs)
        WAITS.add(function.__name__)
        number = RECORD.call(group, [[function.__name__, None, ""]])
        result = _call_inside(function, *args, **kwargs)
        RECORD.wait(number)
        return result

    return run


def _with_gloo(function: Any) -> Any:
    """Return init_process_group, which creates a group of gloo."""

    def run(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        return function("gloo", *args, **kwargs)

    return run


def _with_marked_hosts(function: Any) -> Any:
    """Return new_group, which creates groups of gloo and remembers those that are meant to be of gloo."""
    signature = inspect.signature(function)

    def run(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        is_of_hosts = bound.arguments.get("backend") == "gloo"
        bound.arguments["backend"] = "gloo"
        bound.arguments.pop("device_id", None)
        bound.arguments.pop("pg_options", None)
        group = function(*bound.args, **bound.kwargs)
        if is_of_hosts and isinstance(group, dist.ProcessGroup):
            _host_groups.append(group)
        return group

    return run


def _reporting_nccl(function: Any) -> Any:
    """Return get_backend, which reports NCCL for all groups except those of hosts."""

    def run(group: Any = None) -> str:
        return "gloo" if _is_of_hosts(_default(group)) else "nccl"

    return run
