"""The FLOPs that are counted for layers equal torch's count, and determine how stages divide the layers."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.config.command_line import parse
from megatron.model import GPT2Model, T5Model
from megatron.model.cuts import balanced_cuts
from megatron.model.gpt2_layers import gpt2_layers
from megatron.model.layers import Layer
from megatron.model.parameter_counts import count_parameters
from megatron.model.t5 import t5_layers
from megatron.model.work import flops_per_token

GPT2 = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --vocab-size 100 "
    "--make-vocab-size-divisible-by 1"
)
LLAMA = (
    f"{GPT2} --family llama --position-embedding rope --normalization rmsnorm --activation swiglu --no-hidden-bias "
    "--no-tie-embeddings "
    "--num-key-value-heads 2"
)
EXPERTS = "--num-experts 5 --experts-per-token 2 --expert-ff-hidden-size 20 --moe-layer-frequency 2"
SHARED = "--num-shared-experts 2 --shared-expert-gate"
T5 = (
    "--family t5 --num-layers 2 --num-decoder-layers 3 --hidden-size 32 --num-attention-heads 4 --ff-hidden-size 40 "
    "--objective prefix-lm --enc-seq-length 20 "
    "--dec-seq-length 12 --seq-length 24 --vocab-size 100 --make-vocab-size-divisible-by 1"
)


def _model(flags: str) -> tuple[Any, tuple[torch.Tensor, ...], list[Layer]]:
    config = parse(flags.split())
    if config.is_t5:
        tokens = torch.zeros(1, 20, dtype=torch.long), torch.zeros(1, 12, dtype=torch.long)
        return T5Model(config), tokens, t5_layers(config, 100)
    return GPT2Model(config), (torch.zeros(1, 24, dtype=torch.long),), gpt2_layers(config, 100)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
    """Return unmasked attention [b, n, s, d] of q [b, n, s, d] over k, v [b, groups, s, d]."""
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v


@pytest.mark.parametrize(
    "flags",
    [
        GPT2,
        f"{GPT2} --kv-hidden-size 6 --ff-hidden-size 50",
        LLAMA,
        f"{LLAMA} --num-key-value-heads 1 --kv-hidden-size 6 --ff-hidden-size 50 "
        "--qk-norm --qkv-bias --rotary-percent 0.7",
        T5,
        f"{T5} --activation gated-gelu --kv-hidden-size 6 --no-tie-embeddings",
        f"{GPT2} {EXPERTS}",
        f"{LLAMA} {EXPERTS} {SHARED}",
        f"{T5} {EXPERTS} {SHARED}",
    ],
)
def test_what_is_counted_is_what_torch_counts(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of the layers in multiply-adds is half of the FLOPs that torch's FlopCounterMode counts.

    Attention is replaced by matmuls, since torch does not count its fused CPU kernel. The weighted sum of the outputs
    of a token's experts does not multiply weights, so layers do not count it, but torch counts its `bmm`.
    """
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", _attention)
    model, tokens, layers = _model(flags)
    model.eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*tokens)
    hidden = [tokens[-1 if layer.name.startswith("decoder.") else 0].numel() * 32 for layer in layers if layer.routes]
    assert counter.get_total_flops() == 2 * (sum(layer.work for layer in layers) + 2 * sum(hidden))
    assert len(hidden) == (0 if EXPERTS not in flags else 3 if "t5" in flags else 1)


@pytest.mark.parametrize(
    "flags",
    [
        GPT2,
        f"{GPT2} --no-tie-embeddings",
        LLAMA,
        f"{LLAMA} --tie-embeddings --num-key-value-heads 1 --kv-hidden-size 6 --ff-hidden-size 50",
        f"{GPT2} {EXPERTS}",
        f"{GPT2} {EXPERTS} {SHARED} --no-tie-embeddings",
        f"{LLAMA} {EXPERTS} {SHARED}",
        f"{LLAMA} {EXPERTS} --tie-embeddings",
        f"{T5} {EXPERTS} {SHARED}",
    ],
)
def test_operations_of_a_step(flags: str) -> None:
    """`flops_per_token` counts 6 FLOPs of a training step for each multiply-add of the forward pass."""
    config = parse(flags.split())
    model, _, layers = _model(flags)
    vectors = {name: p.numel() for name, p in model.named_parameters() if p.dim() == 1}
    # Biases of the 3 of 5 experts to which a token is not sent are left out anyway.
    few = sum(vectors.values()) - 3 * sum(n for name, n in vectors.items() if ".experts.0." in name)
    lengths = (20, 12) if config.is_t5 else (24,)
    found = flops_per_token(count_parameters(model) - few, config, *lengths)
    assert found == 6 * sum(layer.work for layer in layers) / sum(lengths)


def _shares(layers: list[Layer], cuts: list[int]) -> list[float]:
    total = sum(layer.work for layer in layers) / (len(cuts) - 1)
    return [sum(layer.work for layer in layers[a:b]) / total for a, b in pairwise(cuts)]


LARGE = "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 1024 --vocab-size 50257"


def test_logits_count() -> None:
    """The partition into stages includes the matmul of the logits, so the last stage has fewer layers.

    In this 1.3B model, the matmul of the logits costs as much as two layers.
    """
    layers = gpt2_layers(parse(LARGE.split()), 50257)
    by_blocks = [0, 5, 8, 11, 14, 17, 20, 23, 28]
    cuts = balanced_cuts(layers, 8, recomputed=False)
    assert max(_shares(layers, cuts)) < 1.25 < 1.5 < max(_shares(layers, by_blocks))
    again = balanced_cuts(layers, 8, recomputed=True)
    assert sum(layer.repeated for layer in layers[again[-2] :]) >= sum(layer.repeated for layer in layers[cuts[-2] :])


@pytest.mark.parametrize("stages", range(1, 12))
@pytest.mark.parametrize("flags", [GPT2, f"{T5} --position-embedding relative"])
def test_every_number_of_stages(flags: str, stages: int) -> None:
    """Each stage has at least one layer for any number of stages.

    If enough layers have matmuls, the last layer of each stage has matmuls, unlike a position table, for example.
    """
    layers = _model(flags)[2]
    if stages > len(layers):
        return
    cuts = balanced_cuts(layers, stages, recomputed=False)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, len(layers), stages + 1) and cuts == sorted(set(cuts))
    if stages <= sum(bool(layer.work) for layer in layers):
        assert all(layers[cut - 1].work for cut in cuts[1:])


def test_layers_that_nobody_counted_are_alike() -> None:
    layers = [Layer(f"layers.{i}", torch.nn.Identity) for i in range(12)]
    assert balanced_cuts(layers, 4, recomputed=False) == [0, 3, 6, 9, 12]
