"""--compile with layers that are split over ranks: their sums are part of what is compiled."""

import pytest
import torch
import torch.distributed as dist

from megatron import mpu
from megatron.config.command_line import parse
from megatron.model.block import Block
from megatron.model.masks import no_documents
from megatron.training import compiling
from megatron.training.compiling import compile_layers, compiler_found
from tests.support import covering, on_ranks

FLAGS = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 8 --vocab-size 64 --hidden-dropout 0 "
    "--attention-dropout 0 --compile --cpu-matmul torch"
)


LLAMA = (
    f"{FLAGS} --family llama --position-embedding rope --normalization rmsnorm --activation swiglu --no-hidden-bias "
    "--num-key-value-heads 2 --qk-norm --sliding-window 5"
)


def _compiled(flags: str, sequence: bool) -> int:
    """Breaks of the graph in one layer; asserts that outputs and gradients are those of the layer itself."""
    config = parse(flags.split())
    mpu.initialize_model_parallel(2, options=mpu.Options(sequence_parallel=sequence))
    torch.manual_seed(0)
    layer, ids = Block(config.model, "layers.0"), no_documents(torch.device("cpu"))
    torch.manual_seed(1 + dist.get_rank() * sequence)
    x = torch.randn(8 // (2 if sequence else 1), 2, 32)

    def run() -> list[torch.Tensor]:
        given = x.clone().requires_grad_()
        layer.zero_grad()
        out, _ = layer((given, ids))
        out.square().sum().backward()
        return [out.detach(), given.grad, *(p.grad.clone() for p in layer.parameters())]  # type: ignore[union-attr,list-item]

    expected = run()
    compiling._keep_outside()
    found = torch._dynamo.explain(layer)((x, ids))  # type: ignore[attr-defined]
    compile_layers(layer, config)
    for ours, theirs in zip(run(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    return int(found.graph_break_count)


@pytest.mark.parametrize(
    ("flags", "sequence"), covering([(FLAGS, False), (FLAGS, True), (LLAMA, True)], lambda case: case[0] is FLAGS, True)
)
def test_a_layer_is_compiled_with_its_sums_over_ranks(flags: str, sequence: bool) -> None:
    if not compiler_found():
        pytest.skip("needs a C++ compiler")
    assert max(on_ranks(2, _compiled, flags, sequence, timeout=200)) == 0
