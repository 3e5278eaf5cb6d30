"""Every name inside torch that this package uses without torch's promise, each with its reason.

What has another way goes that way where the name is missing; what has none says so in a sentence.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d


def will_run(node: Any, otherwise: bool) -> bool:
    """Within a backward pass, whether autograd goes on to `node`, for a leaf: adds to its `.grad`. otherwise: where torch does not tell.

    So it is within torch.autograd.grad, which hands gradients out.
    """
    asked = getattr(torch._C, "_will_engine_execute_node", None)
    try:
        return bool(asked(node)) if asked else otherwise
    except RuntimeError:
        return otherwise


def onednn_is_there() -> bool:
    """Whether this build of torch multiplies by oneDNN when asked; the operator is the one that its compiler emits."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., i], weight [o, i] -> [..., o], by oneDNN; only where `onednn_is_there`. Public functions take MKL in fp32."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x.flatten(0, -2), weight, bias, "none", [], "")
    # Not a view: autograd lets nobody change one in place that a Function of ours gives, and ranks sum in place.
    return torch.ops.aten._unsafe_view(found, (*x.shape[:-1], found.shape[-1]))  # type: ignore[no-any-return]


def softmax_backward(grad: Tensor, p: Tensor) -> Tensor:
    """The gradient of what p = softmax over the last dimension was taken of; grad and p of one shape and dtype.

    In one kernel; public functions give it only through a graph of autograd.
    """
    kernel = getattr(torch.ops.aten, "_softmax_backward_data", None)
    return kernel(grad, p, -1, p.dtype) if kernel else p * (grad - (grad * p).sum(-1, keepdim=True))


def has_flash_on_cpu() -> bool:
    """Whether the two functions below can be called; the public one finds no gradients of a part by itself."""
    names = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")
    return all(hasattr(torch.ops.aten, name) for name in names)


def flash_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, added: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """query [b, n, q, d], key, value [b, n, k, d], added to scores [1 or b, 1 or n, q, k] -> ([b, n, q, d], logs of sums [b, n, q])."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, 0.0, causal, attn_mask=added, scale=scale)  # type: ignore[no-any-return]


def flash_on_cpu_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, added: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key and value from that of `out`; out, sums: what `flash_on_cpu` returned."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return kernel(grad, query, key, value, out, sums, 0.0, causal, attn_mask=added, scale=scale)  # type: ignore[no-any-return]


def assert_later(condition: Tensor, words: str) -> None:
    """Let the device stop with these words where not all of `condition` holds; the host does not wait."""
    check = getattr(torch, "_assert_async", None)
    if check is not None:
        check(condition.all(), words)
    elif not condition.all():  # the host waits, which is slower and as right
        raise RuntimeError(words)


def base_of(tensor: Tensor) -> Tensor:
    """What `tensor` is a view of, or itself: autograd keeps views of weights, which only this tells from activations."""
    base: Tensor | None = tensor._base
    return tensor if base is None else base


def persistent_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers of `module` itself that its state_dict holds; the public way makes a dict of all weights, too."""
    left_out: set[str] = module._non_persistent_buffers_set
    return [(name, buffer) for name, buffer in module.named_buffers(recurse=False) if name not in left_out]


def version(tensor: Tensor) -> int:
    """Return a number that rises with each change in place; comparing values would need a copy."""
    return int(tensor._version)


def amx_tiles() -> bool:
    """Whether this CPU has AMX tiles; False where torch does not tell, so that bf16 is not taken by itself."""
    asked = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(asked()) if asked else False


def cpp_compiler_found() -> bool:
    """Whether torch.compile finds a compiler of C++; it says so only by failing in the first step."""
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler
    except ImportError:
        return False
    try:
        return bool(get_cpp_compiler())
    except (InvalidCxxCompiler, RuntimeError):
        return False


def set_default_timeout(timeout: timedelta) -> None:
    """Of process groups made from now on, those of libraries among them: torch's default, which has no public setter."""
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(distributed_c10d, name, timeout)


def set_timeout_of_groups(timeout: timedelta) -> None:
    """Set the timeout of all process groups of this process, those of libraries included."""
    for group in list(distributed_c10d._world.pg_map):
        if isinstance(group, dist.ProcessGroup):
            group.set_timeout(timeout)


def sum_in_graph(x: Tensor, group: Any) -> Tensor:
    """The sum of `x` over the group as an operation of a compiled graph; torch has no public name for those."""
    from torch.distributed import _functional_collectives as functional

    found: Tensor = functional.all_reduce(x.contiguous(), "sum", group)
    return found


def gather_in_graph(x: Tensor, group: Any) -> Tensor:
    """[s/t, ...] of each rank -> [s, ...], likewise."""
    from torch.distributed import _functional_collectives as functional

    found: Tensor = functional.all_gather_tensor(x.contiguous(), 0, group)
    return found


def scatter_sum_in_graph(x: Tensor, group: Any) -> Tensor:
    """[s, ...] -> [s/t, ...], this rank's stretch of the sum, likewise."""
    from torch.distributed import _functional_collectives as functional

    found: Tensor = functional.reduce_scatter_tensor(x.contiguous(), "sum", 0, group)
    return found
