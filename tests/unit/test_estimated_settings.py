"""Each setting of the model that changes the memory of activations also changes their estimate.

Activations are measured as the storages that autograd saves for the backward pass.
"""

from typing import Any

import pytest
import torch

from megatron.config import Config
from megatron.config.command_line import parse
from megatron.config.sections import ModelConfig
from megatron.estimate.activations import Shapes, kept_bytes
from megatron.estimate.sizes import count_layers, layers_of
from megatron.model import GPT2Model, T5Model
from tests.checkpoints.settings_table import CASES

SIZES = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 500 --batch-size 2 "
    "--precision fp32 --cpu-matmul torch"
)
FAMILIES = {
    "gpt2": f"--family gpt2 {SIZES} --hidden-dropout 0 --attention-dropout 0",
    "llama": f"--family llama {SIZES} --num-key-value-heads 2 --normalization rmsnorm --activation swiglu "
    "--position-embedding rope --no-hidden-bias --hidden-dropout 0 --attention-dropout 0",
    "t5": f"--family t5 {SIZES} --enc-seq-length 32 --dec-seq-length 16 --objective prefix-lm "
    "--position-embedding relative --hidden-dropout 0 --attention-dropout 0",
}
EXPERTS = "--num-experts 4 --experts-per-token 2 --expert-ff-hidden-size 48"
# Settings whose case in CASES does not fit this file's models, or changes too little.
OTHER = {
    "ff_hidden_size": "--ff-hidden-size 512",
    "kv_hidden_size": "--kv-hidden-size 64",
    "qk_norm": "--qk-norm",
    "qkv_bias": "--qkv-bias",
    "relative_attention_max_distance": "--relative-attention-max-distance 64",
}
# These keep activations by hooks of their own, which hide them from this file's meter; benchmarks/plan_memory.py
# measures recomputation.
HIDDEN = {"recompute_modules", "offload_activations"}
FIELDS = sorted((set(ModelConfig.__dataclass_fields__) & set(CASES)) - HIDDEN)
RUNS = [(field, family) for field in FIELDS for family in FAMILIES if CASES[field].model.startswith(family)]


def _kept(config: Config) -> float:
    """Return the bytes that autograd saves in a forward pass, without weights."""
    model: Any = T5Model(config) if config.is_t5 else GPT2Model(config)
    model.train()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in weights:
            seen[x.untyped_storage().data_ptr()] = x.detach()
        return x

    tokens = torch.zeros(2, 32, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        logits = model(tokens, tokens[:, :16]) if config.is_t5 else model(tokens)
    assert logits.requires_grad
    return float(sum(x.untyped_storage().nbytes() for x in seen.values()))


def _measured_and_estimated(flags: str) -> tuple[float, float]:
    config = parse(flags.split())
    layers = layers_of(config)
    with torch.device("meta"):
        built: Any = T5Model(config) if config.is_t5 else GPT2Model(config)
    assert count_layers(layers, config).held == sum(p.numel() for p in built.parameters())
    return _kept(config), kept_bytes(Shapes(config, "fp32", False, 0), layers)


@pytest.mark.parametrize(("field", "family"), RUNS)
def test_a_setting_that_changes_memory_changes_the_estimate(field: str, family: str) -> None:
    case = CASES[field]
    before = f"{FAMILIES[family]} {case.beside}".replace("--num-experts 4", EXPERTS)
    change = OTHER.get(field, case.change).replace("--num-experts 4", EXPERTS)
    for flags in (before, f"{before} {change}"):
        measured, estimated = _measured_and_estimated(flags)
        assert estimated == pytest.approx(measured, rel=0.04)


@pytest.mark.parametrize("activation", ["gelu", "gelu-tanh", "relu", "gated-gelu", "swiglu"])
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("gpt2", ""),
        ("llama", "--num-key-value-heads 4"),
        ("llama", "--qk-norm"),
        ("llama", "--qk-norm --num-key-value-heads 4"),
        ("llama", "--hidden-dropout 0.1"),
        ("llama", "--hidden-dropout 0.1 --attention-dropout 0.1"),
        ("gpt2", "--hidden-dropout 0.1 --attention-dropout 0.1"),
        ("gpt2", f"{EXPERTS} --router-jitter 0.1"),
        (
            "gpt2",
            f"{EXPERTS} --normalization rmsnorm --num-shared-experts 1 --shared-expert-gate --router-z-loss 0.01 "
            "--router-score sigmoid --moe-layer-frequency 2",
        ),
    ],
)
def test_activations_of_combined_settings(activation: str, family: str, more: str) -> None:
    bias = "--no-hidden-bias" if activation in ("gated-gelu", "swiglu") else ""
    measured, estimated = _measured_and_estimated(f"{FAMILIES[family]} --activation {activation} {bias} {more}")
    assert estimated == pytest.approx(measured, rel=0.04)
