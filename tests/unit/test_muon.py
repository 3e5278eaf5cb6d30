"""Muon steps as torch.optim.Muon does on separate matrices, and as torch.optim.AdamW on all other weights."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.config import Config, OptimConfig
from megatron.config.command_line import parse
from megatron.config.fields import ConfigError
from megatron.estimate.per_rank import moment_elements
from megatron.estimate.sizes import count_layers, layers_of
from megatron.model import GPT2Model, T5Model, global_parameters
from megatron.model.muon_parameters import muon_parameters
from megatron.optim import build_optimizer, group_keys
from megatron.optim.muon import Muon, orthogonalise
from tds.base_engine import PipelineHooks
from tds.optimizers import skip_unless_finite, steps_separately
from tests.parity.muon_reference import exact_iterations, separate

SIZES = "--num-layers 2 --hidden-size 24 --num-attention-heads 4 --seq-length 8 --vocab-size 40 --ff-hidden-size 40"
MODELS = {
    "gpt2": SIZES,
    "llama": f"{SIZES} --num-key-value-heads 2 --activation swiglu --normalization rmsnorm --position-embedding rope "
    "--no-hidden-bias --qk-norm --no-tie-embeddings",
    "t5": f"{SIZES} --family t5 --enc-seq-length 8 --dec-seq-length 8 --num-decoder-layers 1 --activation gated-gelu "
    "--kv-hidden-size 10 --position-embedding relative --relative-attention-num-buckets 8",
}
OTHERS = ("word_embeddings", "position_embedding", "relative_positions", "norm", "bias")


def _model(name: str, more: str = "") -> tuple[nn.Module, Config]:
    torch.manual_seed(0)
    config = parse(f"{MODELS[name]} --optimizer muon --lr 0.01 --weight-decay 0.1 {more}".split())
    return (T5Model if name == "t5" else GPT2Model)(config), config


@pytest.mark.parametrize("name", MODELS)
def test_hidden_matrices_are_the_weights_of_transformer_layers(name: str) -> None:
    model, _ = _model(name)
    hidden = muon_parameters(model)
    for path, p in global_parameters(model):
        assert (p in hidden) == (not any(word in path for word in OTHERS)), path


@pytest.mark.parametrize("more", ["", "--muon-adjust-lr-fn original --no-muon-nesterov --muon-lr-factor 3"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_steps_are_those_of_torch(name: str, dtype: torch.dtype, more: str) -> None:
    """Weights after four steps equal those of torch's Muon, which multiplies in bf16, and in fp64 without rounding."""
    exact = dtype is torch.float64
    model, config = _model(name, more)
    model = model.double() if exact else model
    o = config.optim
    ours = build_optimizer(group_keys(model, o), o, hidden=muon_parameters(model), ns_dtype=None if exact else dtype)
    reference: dict[str, list[Tensor]] = {}
    matrices, decay, rest = list[Tensor](), list[Tensor](), list[Tensor]()
    hidden = muon_parameters(model)
    for path, p in global_parameters(model):
        parts = separate(path, p.detach().clone(), config.model)
        reference[path] = [nn.Parameter(part) for part in parts]
        (matrices if p in hidden else decay if p.dim() > 1 else rest).extend(reference[path])
    settings = {"momentum": 0.95, "nesterov": o.muon_nesterov, "adjust_lr_fn": o.muon_adjust_lr_fn}
    muon = torch.optim.Muon(matrices, lr=o.lr * o.muon_lr_factor, weight_decay=0.1, **settings)
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=o.lr)
    for group in ours.param_groups:
        group["lr"] = o.lr * group.get("lr_factor", 1)
    for step in range(4):
        torch.manual_seed(step)
        for path, p in global_parameters(model):
            p.grad = torch.randn_like(p) / (step + 1)
            for part, grad in zip(reference[path], separate(path, p.grad, config.model), strict=True):
                part.grad = grad.clone()
        ours.step()
        with exact_iterations() if exact else _as_it_is():
            muon.step()
        adam.step()
    tolerance = {"rtol": 1e-12, "atol": 1e-13} if exact else {"rtol": 2e-6, "atol": 1e-7}
    for path, p in global_parameters(model):
        for found, expected in zip(separate(path, p.detach(), config.model), reference[path], strict=True):
            torch.testing.assert_close(found, expected.detach(), **tolerance, msg=lambda m, path=path: f"{path}: {m}")


@pytest.mark.parametrize("name", MODELS)
def test_the_memory_estimate_counts_one_moment_for_matrices(name: str) -> None:
    model, config = _model(name)
    optimizer = build_optimizer(group_keys(model, config.optim), config.optim, hidden=muon_parameters(model))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    moments = sum(m.numel() for p in model.parameters() for m in optimizer.state[p].values() if m.shape == p.shape)
    assert moment_elements(count_layers(layers_of(config), config), config) == moments


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


def test_the_iteration_in_bf16_is_that_of_torch_bit_by_bit() -> None:
    for shape in ((6, 6), (5, 17), (17, 5)):
        p = nn.Parameter(torch.zeros(shape))
        p.grad = torch.randn(shape)
        torch.optim.Muon([p], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="original").step()
        ratio = max(1.0, shape[0] / shape[1]) ** 0.5
        found = torch.zeros(shape).add_(orthogonalise(p.grad.bfloat16(), 5), alpha=-ratio)
        assert torch.equal(found, p.detach())


def test_orthogonalised_matrices_have_singular_values_near_1() -> None:
    found = torch.linalg.svdvals(orthogonalise(torch.randn(30, 50, dtype=torch.float64), 10))
    assert 0.6 < found.min() < found.max() < 1.3


def test_a_weight_chooses_with_use_muon() -> None:
    model, config = _model("gpt2")
    weights = dict(global_parameters(model))
    weights["layers.0.mlp.dense_h_to_4h.weight"].use_muon = False  # type: ignore[attr-defined]
    weights["position_embedding.weight"].use_muon = True  # type: ignore[attr-defined]
    hidden = {name for name, p in weights.items() if p in muon_parameters(model)}
    assert "layers.0.mlp.dense_h_to_4h.weight" not in hidden and "position_embedding.weight" in hidden
    weights["final_norm.norm.weight"].use_muon = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="use_muon"):
        o = config.optim
        build_optimizer(group_keys(model, o), o, hidden=muon_parameters(model))


@pytest.mark.parametrize("flags", ["--muon-momentum 0.9", "--no-muon-nesterov", "--optimizer sgd --muon-lr-factor 2"])
def test_settings_of_muon_need_muon(flags: str) -> None:
    with pytest.raises(ConfigError, match="--muon-"):
        parse(f"{SIZES} {flags}".split())


def test_query_key_and_value_differ_from_one_matrix() -> None:
    """Orthogonalising a fused weight as one matrix would be another update, so the tests above can detect it."""
    layer = mpu.ColumnParallelLinear(8, 24)
    fused = mpu.FusedRows((1, 1, 1), 4)
    apart = [orthogonalise(part.reshape(-1, 8), 5) for part in fused.split(layer.weight.detach())]
    together = [part.reshape(-1, 8) for part in fused.split(orthogonalise(layer.weight.detach(), 5))]
    assert all((a - b).abs().max() > 0.05 for a, b in zip(apart, together, strict=True))


def test_a_skipped_step_counts_nowhere() -> None:
    """Muon's groups have no step count, which apex's Adam has, so a skipped step must not make one."""
    model, config = _model("gpt2")
    o = config.optim
    ours = build_optimizer(group_keys(model, o), o, hidden=muon_parameters(model))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    skip_unless_finite(ours, torch.tensor(float("inf")))
    ours.step()
    assert not any("step" in group for group in ours.param_groups) and not any(ours.state.values())


class _CountsInGroups(torch.optim.Optimizer):
    """Counts steps as apex's Adam does: in each call and in each group, also without gradients."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1


def test_an_adam_that_counts_in_groups_is_stepped_once() -> None:
    """tds.DistributedOptimizer must not step it in parts, and a skipped step is not counted."""
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    groups = [{"params": [matrix], "weight_decay": 0.0}, {"params": [vector], "weight_decay": 0.0}]
    ours = Muon(groups, [matrix], OptimConfig(optimizer="muon"), _CountsInGroups)
    assert not steps_separately(ours)
    ours.step()
    skip_unless_finite(ours, torch.tensor(math.nan))
    ours.step()
    assert [group.get("step") for group in ours.param_groups] == [None, 1]


def test_a_pipeline_without_zero_does_not_count_skipped_steps() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = _CountsInGroups([{"params": [weight]}])
    engine: Any = SimpleNamespace(
        module=nn.ParameterList([weight]), optimizer=optimizer, spike_guard=None, torch_autocast_z0_gradscaler=None
    )
    engine.gradient_clipping, engine._norm_is_shared = (lambda: 1.0), False
    for norm in (1.0, math.nan, 1.0):
        weight.grad, engine._global_norm = torch.ones(2), lambda norm=norm: torch.tensor(norm)
        PipelineHooks.clip_fp32_gradients(engine)
        optimizer.step()
    assert optimizer.param_groups[0]["step"] == 2
