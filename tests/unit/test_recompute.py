"""--recompute-modules frees the tensors that it recomputes, and changes no loss or gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.config.command_line import parse
from megatron.config.fields import ConfigError
from megatron.model import GPT2Model, T5Model
from megatron.model.block import ParallelMLP
from megatron.model.layers import init_weights
from megatron.model.recompute import Recipe, save_recipe_for
from megatron.mpu import ColumnParallelLinear

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --vocab-size 100 --hidden-dropout 0 "
    "--attention-dropout 0 --make-vocab-size-divisible-by 1"
)
T5 = (
    f"{FLAGS} --family t5 --enc-seq-length 24 --dec-seq-length 10 --normalization rmsnorm --position-embedding "
    "relative "
    "--no-scale-attention --no-hidden-bias --activation gated-gelu"
)
LLAMA = (
    f"{FLAGS} --family llama --position-embedding rope --normalization rmsnorm --no-hidden-bias --activation swiglu "
    "--num-key-value-heads 2"
)
ALL = "--recompute-modules norm qkv activation"


def _loss(flags: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    config = parse(flags.split())
    model = (T5Model if config.is_t5 else GPT2Model)(config)
    init_weights(model, 5)
    dice = torch.Generator().manual_seed(2)
    text, wanted = (torch.randint(100, (3, n), generator=dice) for n in (24, 11))
    if config.is_t5:
        return model, lambda: model(text, wanted[:, :-1], labels=wanted[:, 1:]).sum()
    return model, lambda: model(text[:, :-1], labels=text[:, 1:]).sum()


@pytest.mark.parametrize(
    "flags",
    [FLAGS, f"{FLAGS} --activation relu", T5, LLAMA, f"{LLAMA} --qk-norm"],
    ids=["gpt2", "relu", "t5", "llama", "qwen3"],
)
@pytest.mark.parametrize("modules", [ALL, "--recompute-modules qkv", "--recompute-modules norm activation"])
@pytest.mark.parametrize("autocast", [False, True])
def test_numbers_are_the_same_to_the_bit(flags: str, modules: str, autocast: bool) -> None:
    results = []
    for more in ("", modules):
        model, loss = _loss(f"{flags} {more}")
        with torch.autocast("cpu", torch.bfloat16, autocast):
            value = loss()
        value.backward()
        results.append([value, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def _kept(flags: str) -> dict[str, int]:
    """Return kind of module -> number of its modules whose outputs are still in memory after the forward pass."""
    model, loss = _loss(flags)
    outputs: dict[str, list[StorageWeakRef]] = {"norm": [], "qkv": [], "activation": []}

    def note(kind: str) -> Any:
        return lambda module, inputs, out: outputs[kind].append(
            StorageWeakRef((out[0] if isinstance(out, tuple) else out).untyped_storage())
        )

    for name, module in model.named_modules():
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and "final" not in name:
            module.register_forward_hook(note("norm"))
        if isinstance(module, ColumnParallelLinear) and "attention" in name:
            module.register_forward_hook(note("qkv"))
        if isinstance(module, ParallelMLP):
            inner = module.activation

            def noting(x: Tensor, inner: Any = inner) -> Tensor:
                out: Tensor = inner(x)
                if torch.is_grad_enabled():
                    note("activation")(None, None, out)
                return out

            module.activation = noting
    value = loss()
    alive = {kind: sum(not each.expired() for each in found) for kind, found in outputs.items()}
    assert all(outputs.values())
    del value
    return alive


@pytest.mark.parametrize("flags", [FLAGS, T5, f"{LLAMA} --qk-norm"], ids=["gpt2", "t5", "llama"])
def test_what_is_computed_again_is_not_kept(flags: str) -> None:
    kept, less = _kept(flags), _kept(f"{flags} {ALL}")
    assert all(kept.values()), kept
    assert not any(less.values()), less


def test_one_result_is_computed_once_for_all_who_saved_it_and_again_for_a_second_pass() -> None:
    calls = []
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)

    def double(given: Tensor) -> Tensor:
        calls.append(1)
        return given * 2

    y = x * 2
    with save_recipe_for((Recipe(double, x), y)):
        out = (y[:2].sin() * y[2:].cos()).sum() + y.exp().sum()
    first = torch.autograd.grad(out, x, retain_graph=True)[0]
    assert len(calls) == 1
    assert torch.equal(first, torch.autograd.grad(out, x)[0]) and len(calls) == 2
    z = x * 2
    assert torch.equal(first, torch.autograd.grad((z[:2].sin() * z[2:].cos()).sum() + z.exp().sum(), x)[0])


@pytest.mark.parametrize(
    "more", ["--checkpoint-activations", "--checkpoint-attention", "--offload-activations", "--compile"]
)
def test_what_does_not_go_together_is_refused(more: str) -> None:
    with pytest.raises(ConfigError, match=f"--recompute-modules cannot be used with {more}"):
        parse(f"{FLAGS} {ALL} {more}".split())
