"""Every private torch name that this package uses. Tests cover the torch versions in pyproject.toml.

If torch lacks a name, the code uses a public alternative if there is one; otherwise it raises RuntimeError.
"""

import contextlib
import copy
import functools
import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Function = Callable[..., Tensor]


def timed_event(device: torch.device) -> torch.Event:
    """Return a device event with timing enabled, recorded now on the accelerator `device`."""
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def to_device(values: Sequence[float], device: torch.device) -> Tensor:
    """Return `values` as a vector `[n]` in fp64 on the device, without waiting for the device."""
    host = torch.tensor(values, dtype=torch.float64, pin_memory=device.type != "cpu")
    return host.to(device, non_blocking=True)


def host_copy(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy that can be moved to `device` without waiting: in pinned memory, unless `tensor` is on a device."""
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.detach().clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor.detach())


def copy_widened(target: Tensor, tensor: Tensor) -> None:
    """Copy a tensor `[...]` into another one of its shape and the same or a wider dtype.

    On CUDA, `copy_` from bf16 to fp32 takes 1.5 times as long as this function (measured on an H200).
    """
    if target.is_cuda and target.dtype is not tensor.dtype and hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_([target], [tensor])
    else:
        target.copy_(tensor)


def compiled_on_cuda(function: Function, eager: Function) -> Function:
    """Return a function of tensors that runs `function`, compiled, on CUDA, and `eager` elsewhere.

    If compiling fails, for instance without Triton, there is a warning and `eager` runs. Both overwrite their first
    argument, which the failed call may have done already, so a second call must change nothing.
    """
    chosen: Function | None = None  # before the first call; then `function`, compiled, or `eager`

    def call(x: Tensor, *others: Tensor) -> Tensor:
        nonlocal chosen
        if not x.is_cuda:
            return eager(x, *others)
        if chosen is None:
            chosen = torch.compile(function)
            try:
                return chosen(x, *others)
            except torch.OutOfMemoryError:  # compiling has not failed, and `eager` needs memory, too
                raise
            except Exception as error:  # the compiler raises errors of many types
                warnings.warn(f"{function.__name__} runs unfused, because torch.compile failed: {error}", stacklevel=2)
                chosen = eager
        return chosen(x, *others)

    return call


def new_local_group(ranks: Sequence[int], backend: str | None) -> Any:
    """Create a process group of these ranks, in a call that only they make, once for these ranks and this backend.

    torch derives the group's name from the number of groups that a rank has. This number may differ between ranks,
    which would then wait for each other forever, so the name here depends on the arguments only.
    """
    c10d = dist.distributed_c10d
    original_hash = getattr(c10d, "_hash_ranks_to_str", None)
    group_name = hashlib.sha1(f"{backend} {list(ranks)}".encode(), usedforsecurity=False).hexdigest()
    if original_hash is not None:
        c10d._hash_ranks_to_str = lambda ranks: group_name
    try:
        return dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)
    finally:
        if original_hash is not None:
            c10d._hash_ranks_to_str = original_hash


def exclude_from_compile(hook: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """Return a forward hook for `module` that torch.compile does not trace if it compiles the module."""
    # Importing PyTorch's compiler takes seconds, so do it only if the module needs it.
    return torch.compiler.disable(hook) if getattr(module, "_compiled_call_impl", None) else hook  # type: ignore[no-untyped-call]


_use_count = getattr(torch._C, "_storage_Use_Count", None)


def has_hooks(tensor: Tensor) -> bool:
    """Return whether `tensor` has gradient hooks besides the one that tds registers."""
    return bool(tensor._backward_hooks) or has_post_hooks(tensor)


def has_post_hooks(tensor: Tensor) -> bool:
    """Return whether `tensor` has post-accumulate-gradient hooks besides the one that tds registers."""
    return len(tensor._post_accumulate_grad_hooks or ()) > 1  # type: ignore[attr-defined]


def storage_use_count(tensor: Tensor) -> int:
    """Return how many tensors use the storage of `tensor`, including itself and those that autograd has saved.

    Raises RuntimeError if torch lacks this count, which has no public function. Without the count, a buffer could be
    reused too early, which would silently corrupt another tensor.
    """
    if _use_count is None:
        raise RuntimeError(
            f"torch {torch.__version__} does not count the users of a tensor's memory: use a version that tds is "
            "tested with"
        )
    # `untyped_storage()` returns an object that is one more user.
    return int(_use_count(tensor.untyped_storage()._cdata)) - 1


def default_store() -> Any:
    """Return the store of the default process group. Raises RuntimeError if torch lacks `_get_default_store`.

    A separate store would need another port, but launchers provide only one port.
    """
    get_store = getattr(dist.distributed_c10d, "_get_default_store", None)
    if get_store is None:
        raise RuntimeError(
            f"torch {torch.__version__} lacks _get_default_store, with which ranks report errors: install a release "
            f"that tds is tested with"
        )
    return get_store()


def can_split(group: Any, device: torch.device) -> bool:
    """Return whether the communicator of `group` on `device` can be split, as with `ncclCommSplit`."""
    return bool(group._get_backend(device).supports_splitting)


def urgent_options(group: Any, device: torch.device) -> Any:
    """Return options for a group split off `group` whose collectives run on a high-priority stream of the device.

    All other options are those of `group`, as torch chooses them. None if the backend, unlike NCCL, has no such option.
    """
    options = group._get_backend(device).options
    if not hasattr(options, "is_high_priority_stream"):
        return None
    options = copy.deepcopy(options)  # splitting changes its options, and `group` may be split again
    options.is_high_priority_stream = True
    return options


def recorded_collectives() -> list[dict[str, Any]]:
    """Return the entries of torch's flight recorder, oldest first; empty if it is off or unreadable.

    torch has no public function that returns these entries; it only writes them to a file when the process dies.
    """
    module = getattr(torch._C, "_distributed_c10d", None)
    entries: list[dict[str, Any]] = []
    # The first function reads the flight recorder of NCCL, the second that of all other backends.
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(module, name, None)
        if dump is not None:
            with contextlib.suppress(RuntimeError, TypeError, ValueError):
                entries += json.loads(dump(includeCollectives=True)).get("entries", [])
    return entries


ROW = 4096  # elements per partial norm; torch's CPU norm of 10 million fp32 elements has a relative error of 5e-4


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the 2-norm of each tensor, a scalar: in one kernel on accelerators, with fp32 accuracy on CPUs."""
    if all(t.device.type == "cpu" for t in tensors):
        return list(map(_norm_by_rows, tensors))
    foreach_norm = getattr(torch, "_foreach_norm", None)
    if foreach_norm is None:
        return [torch.linalg.vector_norm(t) for t in tensors]
    return list(foreach_norm(tensors))


def _norm_by_rows(tensor: Tensor) -> Tensor:
    """Return the 2-norm as a scalar in fp64, computed from the norms of rows of `ROW` elements."""
    flat = tensor.reshape(-1)
    # For example, 10,000 elements are two complete rows of 4096, which have 8192 elements, and a rest of 1808.
    rows_numel = flat.numel() // ROW * ROW
    squares: Tensor = torch.linalg.vector_norm(flat[rows_numel:]).double().square()
    if rows_numel:
        row_norms = torch.linalg.vector_norm(flat[:rows_numel].view(-1, ROW), dim=1)
        squares = squares + row_norms.double().square().sum()
    return squares.sqrt()


def scale_all(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply each tensor in place by `factor`, a scalar; in a single kernel if torch has one."""
    foreach_mul = getattr(torch, "_foreach_mul_", None)
    if foreach_mul:
        foreach_mul(tensors, factor)
        return
    for t in tensors:
        t.mul_(factor)


def scatter_sum(share: Tensor, whole: Tensor, group: Any) -> Any:
    """Start a reduce-scatter of `whole` `[replicas * n]` over the group and return its handle.

    `share` `[n]` is this rank's slice of `whole` and receives the sums; the rest of `whole` is undefined
    afterwards. On gloo this is an all-reduce, because gloo's reduce-scatter takes four times as long over
    four ranks.
    """
    if dist.get_backend(group) == "gloo":
        return dist.all_reduce(whole, group=group, async_op=True)
    # Renamed in torch 2.13. `trace` replaces the functions of `dist`, so they are looked up at each call.
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return reduce_scatter(share, whole, group=group, async_op=True)


def gather_shares(whole: Tensor, share: Tensor, group: Any) -> Any:
    """Start an all-gather of every rank's `share` `[n]`, a slice of `whole`, into `whole` `[replicas * n]`."""
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return all_gather(whole, share, group=group, async_op=True)


def raw_bytes(tensor: Tensor) -> bytes:
    """Return the raw bytes of `tensor` in memory order."""
    # numpy lacks bf16, so it gets bytes. The first view gives a scalar the dimension that the second view needs.
    return tensor.detach().resolve_conj().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def keep_saved_tensors() -> None:
    """Disable donated buffers, so compiled backward passes keep the tensors that their forward pass saved.

    A backward pass that is split in two (zb-h1) reads these tensors twice. Resets torch.compile, so functions compiled
    before are compiled again.
    """
    from torch._functorch import config

    if getattr(config, "donated_buffer", False):
        config.donated_buffer = False
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # type: ignore[no-untyped-call]


def defer_dynamo() -> None:
    """Let torch's optimizers do without torch._dynamo until something else imports it.

    torch keeps their methods out of compiled graphs, so the first optimizer of a process imports torch._dynamo, which
    takes half a second and 60 MB. Before that import, no graph is compiled. Delete this once torch imports it later.
    """
    # Methods of all optimizers, such as zero_grad(). torch wraps them in functions that import torch._dynamo.
    for name, method in vars(torch.optim.Optimizer).items():
        if _is_made_by(method, "torch._compile", "inner"):
            setattr(torch.optim.Optimizer, name, _until_dynamo(method, method.__wrapped__))
    # The step of each optimizer, such as Adam.step. Its wrapper also sets the gradient mode, so the plain step must.
    for optimizer_class in vars(torch.optim).values():
        if not isinstance(optimizer_class, type):
            continue  # another name of the module
        step: Any = vars(optimizer_class).get("step")
        if _is_made_by(step, "torch.optim.optimizer", "_use_grad"):
            optimizer_class.step = _until_dynamo(step, _step_with_grad_mode(step.__wrapped__))  # type: ignore[attr-defined]


def _is_made_by(function: Any, module: str, code_name: str) -> bool:
    """Return whether `function` is the wrapper `code_name` of `module`, which has the name of what it wraps."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_name == code_name and function.__globals__["__name__"] == module


def _until_dynamo(method: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls `plain`, or `method` once torch._dynamo is imported."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        chosen = method if "torch._dynamo" in sys.modules else plain
        return chosen(*args, **kwargs)

    return call


def _step_with_grad_mode(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return `step` of an optimizer with autograd turned on or off by the optimizer's setting `differentiable`."""

    def call(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(optimizer.param_groups[0]["differentiable"]):
            return step(optimizer, *args, **kwargs)

    return call
