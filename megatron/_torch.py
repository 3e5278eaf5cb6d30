"""All uses of private or undocumented torch names in this package, one function for each.

Where a public alternative exists, a function takes it if the installed torch lacks the private name. Where none exists,
the function's docstring says why.
"""

import contextlib
import os
import shutil
import sysconfig
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed import distributed_c10d


def will_run(node: Any, default: bool) -> bool:
    """Return whether the running backward pass executes the autograd node `node`.

    If `node` accumulates the gradient of a leaf, return whether it writes to the leaf's `.grad`.
    default: the result if torch cannot tell, as within torch.autograd.grad, which returns gradients instead of
    accumulating them.
    """
    engine_check = getattr(torch._C, "_will_engine_execute_node", None)
    try:
        return bool(engine_check(node)) if engine_check else default
    except RuntimeError:
        return default


def writes_grad(weight: Tensor) -> bool:
    """Return whether the running backward pass writes to `weight.grad`, for use inside a custom operation.

    torch turns autograd off inside custom operations, and only a private guard can turn it on there. Without the guard,
    the result is True, which is right for `backward()`.
    """
    guard = getattr(torch._C, "_SetExcludeDispatchKeyGuard", None)
    if guard is None:
        return True
    # `get_gradient_edge` needs autograd's dispatch key, which torch excludes inside custom operations. In this block,
    # the guard sets whether the key is excluded, here to False.
    with torch.enable_grad(), guard(torch._C.DispatchKey.AutogradFunctionality, False):
        node = get_gradient_edge(weight).node  # accumulates the gradient of `weight`
    return will_run(node, default=False)  # False within torch.autograd.grad, which does not write to `.grad`


def onednn_is_there() -> bool:
    """Return whether this build of torch has oneDNN and its private matmul operators, which compiled graphs use."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    operators = ("_linear_pointwise", "_reorder_linear_weight")
    return available and all(hasattr(torch.ops.mkldnn, name) for name in operators)


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x [..., i] by the transpose of weight [o, i] in oneDNN -> [..., o].

    Call this only if `onednn_is_there()`. For fp32, torch's public functions use MKL instead of oneDNN.
    """
    rows = x.flatten(0, -2)
    kernel = torch.ops.mkldnn._linear_pointwise
    # "none", [], "": no activation function after the matmul.
    out: Tensor = kernel(rows, weight, bias, "none", [], "")
    shape = (*x.shape[:-1], out.shape[-1])
    return reshape_to_base(out, shape)


def onednn_pack(weight: Tensor, rows: int) -> Tensor:
    """Return weight [o, i] in the memory layout that `onednn_linear` prefers for inputs of `rows` rows.

    Only `onednn_linear` can read the result.
    """
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)  # type: ignore[no-any-return]


_matmul_lock = threading.Lock()


@contextlib.contextmanager
def onednn_matmuls() -> Iterator[None]:
    """Run torch.bmm in oneDNN for fp32 matrices that hold bf16 values or will be rounded to bf16.

    oneDNN may round the factors to bf16 and sums in fp32; it rounds where this is faster, as on CPUs with AMX. The
    setting is that of the process, so no other thread may multiply meanwhile. A second thread waits here.
    """
    settings: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    with _matmul_lock, torch.autocast("cpu", enabled=False):  # autocast would return bf16
        previous = settings.fp32_precision
        settings.fp32_precision = "bf16"
        try:
            yield
        finally:
            settings.fp32_precision = previous


def emulates_matmul(dtype: torch.dtype) -> bool:
    """Return whether this CPU lacks instructions for matmuls in a 16-bit dtype, so that torch's are slow."""
    checks = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    check = getattr(torch.ops.mkldnn, checks.get(dtype, ""), None)  # None for other dtypes
    return check is not None and not check()


def multiplies_in_parts(dtype: torch.dtype) -> bool:
    """Return whether `half_linear` multiplies parts of the rows: in 16 bits on CPUs with AMX, unless it is emulated."""
    return dtype != torch.float32 and has_amx_tiles() and not emulates_matmul(dtype)


def reshape_to_base(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return `x` in another shape, as a tensor that autograd does not regard as a view.

    autograd forbids in-place changes of a view that a custom Function returns, and the all-reduce over tensor-parallel
    ranks changes the result of a matmul in place.
    """
    return torch.ops.aten._unsafe_view(x, shape)  # type: ignore[no-any-return]


def scaled_matmul(x: Tensor, weight: Tensor, x_scales: Tensor, weight_scales: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply fp8 x [n, i] by the transpose of fp8 weight [o, i] -> bf16 [n, o], summing in fp32.

    x_scales, weight_scales: factors of the rows, fp32 [n, 1] and [o, 1]. bias: bf16 [o] or None.
    torch's public name for this matmul, torch.nn.functional.scaled_mm, is newer than the oldest supported torch.
    """
    return torch._scaled_mm(  # type: ignore[no-any-return]
        x, weight.t(), x_scales, weight_scales.t(), bias=bias, out_dtype=torch.bfloat16, use_fast_accum=False
    )


def softmax_backward(grad: Tensor, p: Tensor) -> Tensor:
    """Return the gradient of the input of p = softmax over the last dimension; grad and p have equal shape and dtype.

    torch's kernel is launched once. torch's public functions compute this gradient only through an autograd graph.
    """
    kernel = getattr(torch.ops.aten, "_softmax_backward_data", None)
    if kernel:
        return kernel(grad, p, -1, p.dtype)  # type: ignore[no-any-return]  # -1: the last dimension
    # The formula of the kernel, in several launches: dx_i = p_i * (g_i - sum over j of g_j p_j).
    return p * (grad - (grad * p).sum(-1, keepdim=True))


def has_flash_on_cpu() -> bool:
    """Return whether torch has the kernels of `flash_on_cpu` and `flash_on_cpu_backward`.

    The public scaled_dot_product_attention has no separate backward function.
    """
    names = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")
    return all(hasattr(torch.ops.aten, name) for name in names)


def flash_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, added: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Run flash attention: query [b, n, q, d], key, value [b, n, k, d] -> ([b, n, q, d], log-sum-exp [b, n, q]).

    added: tensor [1 or b, 1 or n, q, k] to add to the scores, or None.
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    # 0.0: no dropout, which this kernel does not support.
    return kernel(query, key, value, 0.0, causal, attn_mask=added, scale=scale)  # type: ignore[no-any-return]


def flash_on_cpu_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    added: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value.

    out, sums: the two results of `flash_on_cpu`. grad: the gradient of `out`.
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    # 0.0: no dropout, as in `flash_on_cpu`.
    return kernel(  # type: ignore[no-any-return]
        grad,
        query,
        key,
        value,
        out,
        sums,
        0.0,
        causal,
        attn_mask=added,
        scale=scale,
    )


def assert_on_device(condition: Tensor, words: str) -> None:
    """Make the device fail with the message `words` unless all elements of `condition` hold.

    The host does not wait for the device.
    """
    check = getattr(torch, "_assert_async", None)
    if check is not None:
        check(condition.all(), words)
    elif not condition.all():  # Without `_assert_async` the host must wait for the result, which is slower.
        raise RuntimeError(words)


def base_of(tensor: Tensor) -> Tensor:
    """Return the tensor of which `tensor` is a view, or `tensor` itself if it is not a view.

    autograd saves views of weights, and only `_base` distinguishes them from activations.
    """
    base: Tensor | None = tensor._base
    return tensor if base is None else base


def persistent_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the persistent buffers of `module`, without those of its submodules.

    The public alternative, `state_dict()`, would also collect all weights.
    """
    non_persistent: set[str] = module._non_persistent_buffers_set
    return [(name, buffer) for name, buffer in module.named_buffers(recurse=False) if name not in non_persistent]


def is_compiled(module: nn.Module) -> bool:
    """Return whether `module.compile()` was called; no public attribute tells."""
    return getattr(module, "_compiled_call_impl", None) is not None


def version_counter(tensor: Tensor) -> int:
    """Return autograd's version counter of a tensor, which rises with each in-place change.

    Tensors of `torch.inference_mode()` have no counter; the result is then 0. Detecting a change without the counter
    would need a copy of the tensor.
    """
    return 0 if tensor.is_inference() else int(tensor._version)


def has_amx_tiles() -> bool:
    """Return whether this CPU has AMX tiles, which make bf16 faster than fp32; False if torch cannot tell."""
    check = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(check()) if check else False


def has_cpp_compiler() -> bool:
    """Return whether torch.compile finds a C++ compiler.

    Without this check, a missing compiler would only raise an error in the first training step.
    """
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler
    except ImportError:
        return False
    try:
        return bool(get_cpp_compiler())
    except (InvalidCxxCompiler, RuntimeError):
        return False


def can_use_triton() -> bool:
    """Return whether torch.compile finds Triton for this device, and what Triton needs: a C compiler, Python's headers.

    Without this check, a missing part would only raise an error in the first training step.
    """
    try:
        from torch.utils._triton import has_triton
    except ImportError:
        return False
    given_compiler = os.environ.get("CC")
    compilers = [given_compiler] if given_compiler else ["gcc", "clang"]  # as in Triton's own search
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return has_triton() and any(map(shutil.which, compilers)) and headers.is_file()


def set_default_timeout(timeout: timedelta) -> None:
    """Set torch's default timeout of process groups created from now on, including those of libraries.

    torch has no public setter.
    """
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(distributed_c10d, name, timeout)


def set_timeout_of_groups(timeout: timedelta) -> None:
    """Set the timeout of all process groups of this process, including those of libraries."""
    for group in list(distributed_c10d._world.pg_map):
        if isinstance(group, dist.ProcessGroup):
            group.set_timeout(timeout)


def all_reduce_in_graph(x: Tensor, group: Any) -> Tensor:
    """All-reduce `x` as an operation of a compiled graph; torch has no public name for collectives in a graph."""
    from torch.distributed import _functional_collectives as functional

    return functional.all_reduce(x.contiguous(), "sum", group)  # type: ignore[no-any-return]


def all_gather_in_graph(x: Tensor, group: Any) -> Tensor:
    """All-gather [s/t, ...] -> [s, ...] as an operation of a compiled graph."""
    from torch.distributed import _functional_collectives as functional

    return functional.all_gather_tensor(x.contiguous(), 0, group)  # type: ignore[no-any-return]


def reduce_scatter_in_graph(x: Tensor, group: Any) -> Tensor:
    """Reduce-scatter [s, ...] -> [s/t, ...] as an operation of a compiled graph."""
    from torch.distributed import _functional_collectives as functional

    return functional.reduce_scatter_tensor(x.contiguous(), "sum", 0, group)  # type: ignore[no-any-return]


def replace_elastic_start(start: Callable[[Any, Callable[[Any], None]], None]) -> None:
    """Make torchrun's agent start processes with `start(group, original)`; `original(group)` is torch's own start."""
    from torch.distributed.elastic.multiprocessing import api

    original = api.PContext.start
    api.PContext.start = lambda group: start(group, original)  # type: ignore[method-assign, assignment]


def ignore_ended_ranks() -> None:
    """Make torchrun's agent end without a traceback if a rank has already ended when the agent sends it a signal."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    original = SubprocessHandler.close

    def close(handler: Any, *args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            original(handler, *args, **kwargs)

    SubprocessHandler.close = close  # type: ignore[method-assign, assignment]


def never_restart_after(code: int) -> None:
    """Disable torchrun's --max-restarts once a rank has exited with `code`."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    original = getattr(LocalElasticAgent, "_monitor_workers", None)
    if original is None:  # This version of torch has no such method, so --max-restarts applies to every exit code.
        return

    def monitor(agent: Any, workers: Any) -> Any:
        result = original(agent, workers)  # result.failures: rank -> failure of a process that has exited with an error
        if any(failure.exitcode == code for failure in result.failures.values()):
            agent._remaining_restarts = 0  # the agent restarts its processes after a failure while this is > 0
        return result

    LocalElasticAgent._monitor_workers = monitor  # type: ignore[method-assign]
