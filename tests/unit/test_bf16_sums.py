"""Gradients of weights in bf16 on a CPU, against sums in fp64 over the same inputs and output gradients.

torch's own kernels add some of these gradients in bf16, in which a sum of ones stops at 256.
"""

from collections import defaultdict
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.config.command_line import parse, with_values
from megatron.model import GPT2Model, T5Model
from megatron.model.gpt2_layers import ModelStart, WordEmbedding
from megatron.model.relative import position_bias
from tests.support import FULL

# Each gradient is rounded to bf16 once or twice, each time by at most 2 ** -9.
TOLERANCE = 5e-3
# Routers compute in fp32, and tables of relative positions have a test below.
ELSEWHERE = ("router.weight", "shared_gate", "relative_positions.weight")
VOCAB = 1000
COMMON = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --hidden-dropout 0 --attention-dropout 0 --seq-length"
LLAMA = (
    "--family llama --normalization rmsnorm --activation swiglu --position-embedding rope --no-hidden-bias "
    "--qk-norm --no-tie-embeddings"
)
EXPERTS = "--num-experts 4 --experts-per-token 2 --num-shared-experts 1 --shared-expert-gate"
FAMILIES = {
    "gpt2": "--family gpt2",
    "llama": LLAMA,
    "t5": "--family t5 --position-embedding relative --num-decoder-layers 2",
    "experts": f"{LLAMA} {EXPERTS}",
}


def zipf(*shape: int) -> Tensor:
    """Draw ids whose frequency falls with their number, as that of words does."""
    odds = 1 / torch.arange(1, VOCAB + 1).double()
    drawn = torch.multinomial(
        odds, torch.Size(shape).numel(), replacement=True, generator=torch.Generator().manual_seed(0)
    )
    return drawn.view(shape)


def difference(found: Tensor, right: Tensor) -> float:
    """Return the norm of the difference relative to the norm of `right`."""
    return float((found.double() - right.double()).norm() / right.double().norm())


class Parts:
    """Weight gradients of a model, computed in fp64 from the inputs and output gradients of each of its layers."""

    def __init__(self, model: nn.Module) -> None:
        self.right: dict[nn.Parameter, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
        for module in model.modules():
            module.register_forward_hook(self._watch)
            if isinstance(module, ModelStart) and module.weight is not None:
                module.look_up_positions = partial(self._positions, module, module.look_up_positions)  # type: ignore[method-assign]
            if isinstance(module, WordEmbedding):
                words = module.word_embeddings
                words.logits = partial(self._logits, words, words.logits)  # type: ignore[method-assign]

    def _watch(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        y = output[0] if isinstance(output, tuple) else output
        if getattr(module, "weight", None) is not None and isinstance(y, Tensor) and y.requires_grad:
            x = inputs[0].detach().clone() if isinstance(inputs[0], Tensor) else None
            y.register_hook(lambda grad: self._add(module, x, grad))

    def _add(self, module: Any, x: Tensor | None, grad: Tensor) -> None:
        if isinstance(module, mpu.VocabParallelEmbedding):
            assert x is not None
            self._look_up(module.weight, x, grad)
        elif isinstance(module, (mpu.ColumnParallelLinear, mpu.RowParallelLinear)):
            assert x is not None
            self._matmul(module.weight, x, grad)
            if module.bias is not None:
                self.right[module.bias] = self.right[module.bias] + rows(grad).sum(0)
        elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            assert x is not None
            wide = rows(x)
            centred = wide - wide.mean(1, keepdim=True) if isinstance(module, nn.LayerNorm) else wide
            normal = centred / (centred.square().mean(1, keepdim=True) + (module.eps or 0)).sqrt()
            self.right[module.weight] = self.right[module.weight] + (rows(grad) * normal).sum(0)
            if isinstance(module, nn.LayerNorm):
                self.right[module.bias] = self.right[module.bias] + rows(grad).sum(0)

    def _look_up(self, weight: nn.Parameter, ids: Tensor, grad: Tensor) -> None:
        found = torch.zeros(weight.shape, dtype=torch.float64)
        self.right[weight] = self.right[weight] + found.index_add(0, ids.flatten(), rows(grad))

    def _matmul(self, weight: nn.Parameter, x: Tensor, grad: Tensor) -> None:
        self.right[weight] = self.right[weight] + rows(grad).t() @ rows(x)

    def _positions(self, module: ModelStart, vectors: Any, places: Tensor) -> Tensor:
        found: Tensor = vectors(places)
        assert module.weight is not None
        weight, ids = module.weight, places.clone()
        found.register_hook(lambda grad: self._look_up(weight, ids, grad))
        return found

    def _logits(self, module: Any, logits: Any, hidden: Tensor) -> Tensor:
        found: Tensor = logits(hidden)
        x = hidden.detach().clone()
        found.register_hook(lambda grad: self._matmul(module.weight, x, grad))
        return found


def rows(x: Tensor) -> Tensor:
    """Return x [..., h] as [n, h] in fp64."""
    return x.double().flatten(0, -2)


def trained(family: str, batch: int, length: int) -> tuple[nn.Module, Parts]:
    """Return a model in bf16 after one backward pass over batch x length tokens, and the gradients that are right."""
    lengths = f"{length} --enc-seq-length {length} --dec-seq-length {length}" if family == "t5" else str(length)
    settings = f"{FAMILIES[family]} {COMMON} {lengths} --logits-chunk-size 0 --init-method-std 0.1"
    config = with_values(parse(settings.split()), {"vocab_size": VOCAB})
    torch.manual_seed(1)
    model = (T5Model if family == "t5" else GPT2Model)(config).bfloat16().train()
    tokens = zipf(batch, length)
    parts = Parts(model)
    inputs = (tokens, tokens) if family == "t5" else (tokens,)
    model(*inputs, labels=tokens.roll(1, 1), loss_mask=torch.ones(tokens.shape)).backward()
    return model, parts


@pytest.mark.parametrize("tokens", [8192, pytest.param(32768, marks=FULL)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_gradient_of_a_model_is_a_sum_in_fp32(family: str, tokens: int) -> None:
    model, parts = trained(family, tokens // 128, 128)
    found = {name: p for name, p in model.named_parameters() if p in parts.right}
    wrong = {name: round(difference(p.grad, parts.right[p]), 4) for name, p in found.items()}
    assert {name for name, value in wrong.items() if value > TOLERANCE} == set(), wrong
    unchecked = [name for name, p in model.named_parameters() if p not in parts.right]
    assert all(name.endswith(ELSEWHERE) for name in unchecked), unchecked


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_relative_positions_sum_their_gradients_in_fp32(causal: bool, plain: bool) -> None:
    flags = f"{FAMILIES['t5']} {COMMON} 512" + (" --reference-ops relative-positions" if plain else "")
    config = parse(flags.split()).model
    table = torch.randn(config.relative_attention_num_buckets, 4).bfloat16().requires_grad_()
    wide = table.detach().double().requires_grad_()
    grad = (torch.randn(1, 4, 512, 512, generator=torch.Generator().manual_seed(0)) + 0.3).bfloat16()
    position_bias(table, 512, 512, config, causal).backward(grad)
    position_bias(wide, 512, 512, config, causal).backward(grad.double())
    assert table.grad is not None and wide.grad is not None
    assert difference(table.grad, wide.grad) < TOLERANCE


class Own(nn.Module):
    """Custom model of layers of mpu."""

    def __init__(self) -> None:
        super().__init__()
        self.words = mpu.VocabParallelEmbedding(VOCAB, 32)
        self.norm = mpu.LayerNorm(32, bias=False)
        self.up = mpu.ColumnParallelLinear(32, 64)
        self.last = mpu.LayerNorm(64)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.last(self.up(self.norm(self.words(ids)))[0])
        return found


@pytest.mark.parametrize("tokens", [8192, 32768])
def test_layers_of_mpu_sum_their_gradients_in_fp32(tokens: int) -> None:
    torch.manual_seed(2)
    model = Own().bfloat16()
    parts = Parts(model)
    found = model(zipf(tokens))
    found.backward((torch.randn(found.shape) + 0.3).bfloat16())
    for name, p in model.named_parameters():
        assert difference(p.grad, parts.right[p]) < TOLERANCE, name
