"""--compile with tensor-parallel layers: their all-reduces and their dropout are compiled as well."""

from functools import partial, partialmethod

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron import mpu
from megatron.config.command_line import parse
from megatron.features import compiling
from megatron.features.compiling import compile_layers, compiler_found
from megatron.model.block import Block
from megatron.model.layers import init_weights
from megatron.model.masks import no_documents
from megatron.model.t5 import DecoderBlock
from tests.support import covering, on_ranks

FLAGS = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 8 --vocab-size 64 --compile "
    "--cpu-matmul torch"
)
DROPOUTS = ["--hidden-dropout 0 --attention-dropout 0", "--hidden-dropout 0.2 --attention-dropout 0.3"]


LLAMA = (
    f"{FLAGS} {DROPOUTS[0]} --family llama --position-embedding rope --normalization rmsnorm --activation swiglu "
    "--no-hidden-bias "
    "--num-key-value-heads 2 --qk-norm --sliding-window 5"
)


def _compiled(flags: str, sequence: bool, onednn: bool, kernels: bool) -> int:
    """Check the outputs and gradients of a compiled layer; return the number of its graph breaks.

    kernels: whether to generate C++ kernels, which takes most of the time; otherwise torch runs the compiled graphs.
    """
    config = parse(flags.split())
    mpu.initialize_model_parallel(2, options=mpu.Options(sequence_parallel=sequence, onednn=onednn))
    torch.manual_seed(0)
    ids = no_documents(torch.device("cpu"))
    layer: nn.Module = DecoderBlock(config.model, "layers.0") if config.is_t5 else Block(config.model, "layers.0")
    torch.manual_seed(1 + dist.get_rank() * sequence)
    x = torch.randn((64 if onednn else 8) // (2 if sequence else 1), 2, 32)
    others = [torch.randn(16, 2, 32), ids, ids, torch.randn(32, 2)] if config.is_t5 else [ids]

    def run() -> list[Tensor]:
        given = x.clone().requires_grad_()
        layer.zero_grad()
        mpu.get_rng().begin(3)
        out, *_ = layer((given, *others))
        out.square().sum().backward()
        return [out.detach(), given.grad, *(p.grad.clone() for p in layer.parameters())]  # type: ignore[union-attr,list-item]

    expected = run()
    compiling._exclude_from_compiling()
    found = torch._dynamo.explain(layer)((x, *others))  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        if not kernels:
            patch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
        compile_layers(layer, config)
    for ours, theirs in zip(run(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))
    return int(found.graph_break_count)


T5 = (
    "--family t5 --position-embedding relative --normalization rmsnorm --activation gated-gelu --no-hidden-bias "
    "--num-layers 1 "
    "--hidden-size 32 --num-attention-heads 4 --vocab-size 64 --compile"
)
CASES = [(f"{FLAGS} {dropout}", sequence, False) for dropout in DROPOUTS for sequence in (False, True)]
SHARED = LLAMA.replace("--num-key-value-heads 2", "--num-key-value-heads 1")  # 2 ranks share the key-value head
CASES += [
    (LLAMA, True, False),
    (SHARED, True, False),
    (f"{FLAGS} {DROPOUTS[1]}", True, True),
    (f"{T5} {DROPOUTS[0]}", False, True),
]
IN_CI = [(*CASES[7], False)]  # T5


@pytest.mark.parametrize(
    ("flags", "sequence", "onednn", "kernels"),
    covering([(*case, kernels) for case in CASES for kernels in (False, True)], lambda case: case in IN_CI, True),
)
def test_a_layer_is_compiled_with_its_sums_over_ranks(flags: str, sequence: bool, onednn: bool, kernels: bool) -> None:
    """A tensor-parallel layer, including its all-reduces, compiles without graph breaks, with any kind of matmul."""
    if not compiler_found():
        pytest.skip("needs a C++ compiler")
    if onednn and not mpu.onednn_is_there():
        pytest.skip("this build of torch has no oneDNN")
    assert max(on_ranks(2, _compiled, flags, sequence, onednn, kernels, timeout=200)) == 0


def test_equal_layers_with_dropout_are_compiled_once_and_draw_as_if_they_were_not() -> None:
    config = parse(f"{FLAGS} {DROPOUTS[1]} --init-method-std 0.3".split())
    layers = [Block(config.model, f"layers.{i}").double() for i in range(3)]
    init_weights(nn.Sequential(*layers), 1)
    ids = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 3], [1, 2, 2, 2, 2, 2, 3, 3]])
    x = torch.randn(8, 2, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def run(again: bool) -> list[Tensor]:
        """Return outputs and input gradients of two micro-batches. again: recompute layers in the backward pass."""
        mpu.get_rng().begin(3)
        found = []
        for _ in range(2):
            hidden = given = x.clone().requires_grad_()
            for layer in layers:
                hidden, _ = mpu.checkpoint(layer, (hidden, ids)) if again else layer((hidden, ids))
            (grad,) = torch.autograd.grad(hidden.square().sum(), given)
            found += [hidden.detach(), grad]
        return found

    expected = run(False)
    torch.testing.assert_close(run(True), expected, rtol=0, atol=0)
    assert (expected[0] - expected[2]).abs().max() > 0.1, "each micro-batch must draw new dropout masks"
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiling._exclude_from_compiling()
    for layer in layers:
        layer.compile(backend="aot_eager_decomp_partition")  # torch.compile without kernel generation
    for again in (False, True):
        torch.testing.assert_close(run(again), expected, rtol=1e-9, atol=1e-9)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_part_that_breaks_the_graph_runs_in_a_compiled_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse(f"{FLAGS} {DROPOUTS[0]}".split())
    layer = Block(config.model, "layers.0")
    init_weights(layer, 1)
    pair = torch.randn(8, 2, 32), no_documents(torch.device("cpu"))
    expected, _ = layer(pair)
    normalise = layer.input_layernorm.forward

    def break_graph(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return normalise(x)  # type: ignore[no-any-return]

    monkeypatch.setattr(layer.input_layernorm, "forward", break_graph)
    torch._dynamo.reset()
    layer.compile(backend="eager")
    torch.testing.assert_close(layer(pair)[0], expected)


def _stretches() -> None:
    """Check that a compiled layer draws the dropout masks of the eager layer for both sequence chunks of a rank.

    Each context-parallel rank has two chunks. With a sliding window, the attention masks of both chunks have the same
    shape, so torch could wrongly reuse one compiled graph.
    """
    mpu.initialize_model_parallel(context_parallel_size=2)
    flags = LLAMA.replace("--attention-dropout 0", "--attention-dropout 0.5").replace(
        "--sliding-window 5", "--sliding-window 3"
    )
    config = parse(f"{flags} --context-parallel-size 2".replace("--seq-length 8", "--seq-length 16").split())
    layer, ids = Block(config.model, "layers.0").double(), no_documents(torch.device("cpu"))
    init_weights(layer, 1)
    whole = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = mpu.shard_sequence(whole, 0, mpu.context_axis())

    def run() -> list[Tensor]:
        given = x.clone().requires_grad_()
        mpu.get_rng().begin(3)
        out, _ = layer((given, ids))
        out.square().sum().backward()
        assert given.grad is not None
        return [out.detach(), given.grad]

    expected = run()
    compiling._exclude_from_compiling()
    layer.compile(backend="aot_eager_decomp_partition")  # torch.compile without kernel generation
    for ours, theirs in zip(run(), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not torch._dynamo.utils.counters["graph_break"]


def test_stretches_of_a_compiled_layer_draw_masks_of_their_own() -> None:
    on_ranks(2, _stretches)


class Sums(dict[nn.Parameter, Tensor]):
    """Stand-in for an optimizer: the sum of each weight's gradients, given by its two factors."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.hooked = False
        self.weights = [
            m.weight for m in layer.modules() if isinstance(m, mpu.ColumnParallelLinear | mpu.RowParallelLinear)
        ]
        for weight in self.weights:
            weight.spec.accumulate_wgrad = partial(self.accumulate, weight)  # type: ignore[union-attr]

    def accumulate(self, weight: nn.Parameter, left: Tensor, right: Tensor) -> bool:
        if not self.hooked:
            self[weight] = self.get(weight, torch.zeros_like(weight)) + left @ right
        return not self.hooked


@pytest.fixture
def accumulating() -> tuple[Block, Tensor, Tensor, Sums, list[Tensor]]:
    """Return a compiled layer, its input and document ids, the sums of its weight gradients, and the expected sums."""
    config = parse(LLAMA.split())
    layer, ids = Block(config.model, "layers.0").double(), no_documents(torch.device("cpu"))
    x = torch.randn(8, 2, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    sums = Sums(layer)
    layer((x, ids))[0].square().sum().backward()
    expected = [sums.pop(weight) for weight in sums.weights]
    assert len(expected) == 4
    compiling._exclude_from_compiling()
    compiling.accumulate_in_graph(layer)
    layer.compile(backend="aot_eager_decomp_partition")  # torch.compile without kernel generation
    return layer, x, ids, sums, expected


Accumulating = tuple[Block, Tensor, Tensor, Sums, list[Tensor]]


def test_a_compiled_layer_gives_weight_gradients_to_the_optimizer(accumulating: Accumulating) -> None:
    """Two micro-batches add twice the gradient to the optimizer's sums, and nothing to `.grad`."""
    layer, x, ids, sums, expected = accumulating
    for times in (1, 2):
        layer((x, ids))[0].square().sum().backward()
        for weight, wanted in zip(sums.weights, expected, strict=True):
            torch.testing.assert_close(sums[weight], times * wanted)
            assert weight.grad is None
    assert layer.input_layernorm.weight.grad is not None


def test_a_recomputed_layer_gives_weight_gradients_to_the_optimizer(accumulating: Accumulating) -> None:
    layer, x, ids, sums, expected = accumulating
    mpu.checkpoint(layer, (x, ids))[0].square().sum().backward()
    for weight, wanted in zip(sums.weights, expected, strict=True):
        torch.testing.assert_close(sums[weight], wanted)
        assert weight.grad is None


def test_a_gradient_of_inputs_alone_changes_no_sum(accumulating: Accumulating) -> None:
    layer, x, ids, sums, _ = accumulating
    (found,) = torch.autograd.grad(layer((x, ids))[0].square().sum(), x)
    assert not sums
    assert x.grad is not None
    torch.testing.assert_close(found, x.grad)


def test_hooks_get_the_gradients_of_a_compiled_layer_that_runs_eagerly(accumulating: Accumulating) -> None:
    layer, x, ids, sums, expected = accumulating
    sums.hooked = True
    with torch.compiler.set_stance("force_eager"):  # type: ignore[no-untyped-call]
        layer((x, ids))[0].square().sum().backward()
    for weight, wanted in zip(sums.weights, expected, strict=True):
        torch.testing.assert_close(weight.grad, wanted)


def test_a_compiled_layer_refuses_a_hook_that_it_cannot_call(accumulating: Accumulating) -> None:
    layer, x, ids, sums, _ = accumulating
    sums.hooked = True
    with pytest.raises(RuntimeError, match="gradient hook.* --no-compile"):
        layer((x, ids))[0].square().sum().backward()


def _on_unlike_hosts(hosts_with_compiler: tuple[bool, bool]) -> bool:
    config = parse(FLAGS.split())
    mpu.initialize_model_parallel(2)
    layer = Block(config.model, "layers.0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "compiler_found", lambda: hosts_with_compiler[dist.get_rank()])
        compile_layers(nn.Sequential(layer), config)
    return layer._compiled_call_impl is not None


@pytest.mark.parametrize("hosts", [(True, True), (True, False), (False, True)])
def test_either_all_ranks_compile_or_none(hosts: tuple[bool, bool]) -> None:
    assert on_ranks(2, _on_unlike_hosts, hosts) == [all(hosts)] * 2
