"""Memory traffic of a Llama layer on an accelerator, in passes over one tensor [s, b, h].

The layer runs on the meta device, on which the code takes the branches of accelerators. Every torch operation counts
as one kernel that reads its inputs from memory and writes its results to memory. Norms, attention and the functions of
`megatron.fused` are single kernels on CUDA, so each counts as one operation. Weights and their gradients do not
count.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.config.command_line import parse
from megatron.features.compiling import compiler_found
from megatron.fused import Fused, compile_pointwise
from megatron.model import grouped_heads
from megatron.model.block import Block
from megatron.model.gated_activations import GATED_GELU, SWIGLU, GatedActivation
from megatron.model.rotary import Rotation
from tests.support import covering

# The sequence length is a prime number, so a tensor is an activation exactly if its size is a multiple of this length.
S, B, H, WIDE = 251, 2, 1024, 2816
SECTOR = 32  # bytes: the smallest part of memory that a GPU reads or writes
LLAMA = (
    f"--num-layers 1 --hidden-size {H} --ff-hidden-size {WIDE} --num-attention-heads 16 --seq-length {S} "
    "--vocab-size 64 --family llama --position-embedding rope --normalization rmsnorm --activation swiglu "
    "--no-hidden-bias --hidden-dropout 0 --attention-dropout 0 --kernels torch --cpu-matmul torch"
)
WRITES_ONLY = {"copy_", "zero_", "fill_"}
WITHOUT_TRAFFIC = {"empty", "empty_like", "new_empty", "_unsafe_view", "detach"}


def traffic(tensor: Tensor) -> int:
    """Return the bytes of memory that a kernel moves to read or write `tensor`; 0 for weights and small tensors.

    A kernel that skips elements moves them all the same, up to the size of a sector.
    """
    if tensor.numel() % S or tensor.numel() < S * B * H // 4:
        return 0
    apart = min(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    return tensor.numel() * min(max(apart, 1) * tensor.element_size(), SECTOR)


class Traffic(TorchDispatchMode):
    """Sum of the bytes that torch's operations read and write, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.inside_a_kernel = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not (self.inside_a_kernel or func.is_view or name in WITHOUT_TRAFFIC):
            given = args[1:] if name in WRITES_ONLY else args
            read = [*tree_leaves(given), *(v for k, v in (kwargs or {}).items() if not _is_written(func, k))]
            self.add(name, [*read, *tree_leaves(out)])
        return out

    def add(self, name: str, tensors: Iterable[Any]) -> None:
        """Count one kernel that reads or writes each tensor in `tensors` as often as it is listed."""
        self.found[name] += sum(traffic(t) for t in tensors if isinstance(t, Tensor))

    def kernel(self, name: str, function: Callable[..., Any], *inputs: Any) -> Any:
        """Return function(*inputs), counted as one kernel."""
        self.inside_a_kernel = True
        try:
            out = function(*inputs)
        finally:
            self.inside_a_kernel = False
        self.add(name, [*{id(x): x for x in tree_leaves(inputs)}.values(), *tree_leaves(out)])
        return out

    def passes(self, name: str | None = None) -> float:
        """Return the traffic of one operation, or of all, in passes over a bf16 tensor [s, b, h]."""
        return (sum(self.found.values()) if name is None else self.found[name]) / (2 * S * B * H)


def _is_written(func: Any, name: str) -> bool:
    return any(a.name == name and a.alias_info and a.alias_info.is_write for a in func._schema.arguments)


class _OneKernel(torch.autograd.Function):
    """Function that takes one kernel forward, and one backward that reads inputs, output and gradient."""

    @staticmethod
    def forward(ctx: Any, count: Traffic, name: str, *inputs: Tensor) -> Tensor:
        ctx.count, ctx.name = count, name
        out: Tensor = count.kernel(name, lambda first, *_: torch.empty_like(first), *inputs)
        ctx.save_for_backward(*inputs, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        *inputs, out = ctx.saved_tensors
        found = ctx.count.kernel(
            f"{ctx.name} gradient", lambda *all: list(map(torch.empty_like, all[:-2])), *inputs, out, grad
        )
        return None, None, *found


def fused_kernels(patch: pytest.MonkeyPatch, count: Traffic, compiled: bool) -> None:
    """Count norms and attention as one kernel each, and with `compiled` also each function of `fused.py`."""
    patch.setattr(F, "rms_norm", lambda x, _, weight, eps: _OneKernel.apply(count, "rms_norm", x, weight))
    attention = "scaled_dot_product_attention"
    patch.setattr(F, attention, lambda q, k, v, **_: _OneKernel.apply(count, "attention", q, k, v))
    if compiled:
        patch.setattr(Fused, "__call__", lambda self, *args: count.kernel(self.plain.__name__, self.plain, *args))


def traffic_of_a_layer(flags: str, patch: pytest.MonkeyPatch, compiled: bool) -> Traffic:
    """Return the traffic of one forward and backward pass of a bf16 layer on an accelerator."""
    config, count = parse(flags.split()), Traffic()
    with torch.device("meta"):
        layer = Block(config.model, "layers.0").to(torch.bfloat16)
        x = torch.empty(S, B, H, dtype=torch.bfloat16, requires_grad=True)
        ids, grad = torch.empty(0, dtype=torch.int16), torch.empty(S, B, H, dtype=torch.bfloat16)
    fused_kernels(patch, count, compiled)
    with count:
        out, _ = layer((x, ids))
        out.backward(grad)
    return count


# Passes besides matmuls. The limits may only fall. Before the functions of `fused.py`, both numbers were 128.75.
@pytest.mark.parametrize(("compiled", "limit"), [(True, 70.0), (False, 123.25)], ids=["CUDA", "other accelerators"])
def test_a_llama_layer(compiled: bool, limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    count = traffic_of_a_layer(LLAMA, monkeypatch, compiled)
    assert count.passes("mm") == 48.75  # 3 x 16.25: forward pass, gradients of inputs and of weights
    assert count.passes() - count.passes("mm") <= limit, {name: count.passes(name) for name in count.found}


SHAPE, D = (6, 2, 3, 4, 8), 8  # [s, b, g, p + 2, d] with p = 2 queries for a key
PARTS = (2, 1, 1)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def _parts_in_order(by_group: Tensor, parts: tuple[int, ...], rotation: Rotation) -> Tensor:
    """Return the eager result of "rotated parts" with tokens first, as on CUDA; on CPUs, heads are first in memory."""
    memory = grouped_heads._rotate_parts_eagerly(by_group, parts, rotation)
    places = [*grouped_heads._part_buffers(memory, list(grouped_heads._part_views(by_group, parts)))]
    assert not places[0].is_contiguous()
    return torch.cat([place.flatten() for place in places])


def fused_functions() -> dict[str, tuple[Fused, tuple[Any, ...]]]:
    """Return each fused function with inputs: {name: (function, inputs)}."""
    rotation = Rotation(draw(6, 1, 1, 3), draw(6, 1, 1, 3))  # rotates 6 of 8 elements
    grads = tuple(draw(2, 3 * part, 6, D).permute(2, 0, 1, 3) for part in PARTS)
    x, grad = draw(5, 2, 12), draw(5, 2, 6)
    return {
        "swiglu": (SWIGLU.forward, (x,)),
        "gradient of swiglu": (SWIGLU.backward, (grad, x)),
        "gated gelu": (GATED_GELU.forward, (x,)),
        "gradient of gated gelu": (GATED_GELU.backward, (grad, x)),
        "rotated parts": (Fused(grouped_heads._rotate_parts, _parts_in_order), (draw(*SHAPE), PARTS, rotation)),
        "joined gradients": (grouped_heads._FUSED_JOIN, (grads[0], grads, torch.Size(SHAPE), PARTS, rotation)),
        "without a key": (
            grouped_heads._FUSED_JOIN,
            (grads[0], (grads[0], None, grads[2]), torch.Size(SHAPE), PARTS, rotation),
        ),
    }


@pytest.mark.parametrize("name", fused_functions())
def test_both_definitions_of_a_fused_function_agree(name: str) -> None:
    function, inputs = fused_functions()[name]
    torch.testing.assert_close(function.plain(*inputs), function.eager(*inputs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", [SWIGLU, GATED_GELU], ids=["swiglu", "gated gelu"])
def test_the_gradient_of_a_gated_activation_is_autograds(activation: GatedActivation) -> None:
    """The gradient on accelerators and that for the compiler equal autograd's gradient of the two-line definition."""
    x, grad = draw(5, 2, 12).requires_grad_(), draw(5, 2, 6)
    (wanted,) = torch.autograd.grad(activation.plain(x), x, grad)
    for function in (activation.gradient_in_place, activation.plain_gradient):
        torch.testing.assert_close(function(grad, x.detach()), wanted, rtol=1e-12, atol=1e-12)


IN_CI = ("gradient of swiglu", "joined gradients")


@pytest.mark.parametrize("name", covering(list(fused_functions()), IN_CI.__contains__))
def test_a_fused_function_reads_its_inputs_and_writes_its_results_once(name: str) -> None:
    """The compiler's plan for a function moves as many bytes as its inputs and results have."""
    if not compiler_found():
        pytest.skip("needs a C++ compiler")
    from torch._inductor import config, metrics
    from torch._inductor.compile_fx import inductor_metrics_log

    function, inputs = fused_functions()[name]
    metrics.reset()
    inductor_metrics_log.setLevel(logging.INFO)
    try:
        with config.patch(fx_graph_cache=False):
            found = compile_pointwise(function.plain)(*inputs)
    finally:
        inductor_metrics_log.setLevel(logging.NOTSET)
    torch.testing.assert_close(found, function.eager(*inputs), rtol=1e-12, atol=1e-12)
    tensors = {id(x): x for x in tree_leaves((inputs, found)) if isinstance(x, Tensor)}
    assert metrics.num_bytes_accessed <= sum(x.nbytes for x in tensors.values())


class _OnCuda(Tensor):
    """Stand-in for a CUDA tensor: a CPU tensor that says that it lies on a CUDA device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")


def test_a_function_that_cannot_be_compiled_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed compilation gives one warning that names the function; all calls then use the eager definition."""

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no Triton\nmore lines")

    monkeypatch.setattr(torch, "compile", fails)
    function = Fused(SWIGLU.plain, SWIGLU.eager)
    x = draw(5, 2, 12)
    with pytest.warns(UserWarning, match="plain runs unfused, because torch.compile failed: no Triton$"):
        found = function(x.as_subclass(_OnCuda))
    assert torch.equal(found.as_subclass(Tensor), SWIGLU.eager(x))
    assert torch.equal(function(x.as_subclass(_OnCuda)).as_subclass(Tensor), SWIGLU.eager(x))


def test_a_lack_of_memory_is_not_mistaken_for_a_failed_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "compile", lambda *_, **__: fails)
    with pytest.raises(torch.OutOfMemoryError):
        Fused(SWIGLU.plain, SWIGLU.eager)(draw(5, 2, 12).as_subclass(_OnCuda))
