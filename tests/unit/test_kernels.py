"""Tests of the choice between kernels of apex and torch, with a stand-in for apex."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron import kernels
from megatron.config import Config
from megatron.config.command_line import parse
from megatron.model import GPT2Model, T5Model
from megatron.model.layers import init_weights
from megatron.optim import build_optimizer, group_keys
from tds import optimizer_state as zero_state
from tests.sentences import SENTENCES

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --vocab-size 100 --hidden-dropout 0 "
    "--attention-dropout 0 --lr 0.01 --weight-decay 0.1"
)
T5 = (
    f"{FLAGS} --family t5 --enc-seq-length 24 --dec-seq-length 10 --normalization rmsnorm --position-embedding "
    "relative --no-hidden-bias"
)


class FusedLayerNorm(nn.Module):
    def __init__(self, normalized_shape: int, eps: float = 1e-5, elementwise_affine: bool = True) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = (
            nn.Parameter(torch.ones(normalized_shape)),
            nn.Parameter(torch.zeros(normalized_shape)),
            eps,
        )

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight + self.bias


class FusedRMSNorm(nn.Module):
    def __init__(self, normalized_shape: int, eps: float = 1e-5, elementwise_affine: bool = True) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(normalized_shape)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight


class FusedAdam(torch.optim.Optimizer):
    """A stand-in for apex's FusedAdam: AdamW that counts steps per parameter group instead of per parameter."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        assert adam_w_mode and bias_correction
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            t = group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                for key, beta, x in zip(("exp_avg", "exp_avg_sq"), group["betas"], (p.grad, p.grad**2), strict=True):
                    state[key].mul_(beta).add_(x, alpha=1 - beta)
                mean, square = (state[k] / (1 - b**t) for k, b in zip(state, group["betas"], strict=False))
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(
                    group["lr"] * mean / (square.sqrt() + group["eps"])
                )


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that a GPU and apex are present."""
    apex, normalization, optimizers = (
        ModuleType("apex"),
        ModuleType("apex.normalization"),
        ModuleType("apex.optimizers"),
    )
    normalization.FusedLayerNorm, normalization.FusedRMSNorm = FusedLayerNorm, FusedRMSNorm  # type: ignore[attr-defined]
    optimizers.FusedAdam = FusedAdam  # type: ignore[attr-defined]
    for module in (apex, normalization, optimizers):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(kernels, "_on_gpu", lambda: True)


def _model(config: Config) -> tuple[nn.Module, Any]:
    model = (T5Model if config.is_t5 else GPT2Model)(config)
    init_weights(model, 5)
    model.double()
    text = torch.arange(3 * 24).view(3, 24) % 100
    if config.is_t5:
        return model, lambda: model(text, text[:, :10], labels=text[:, 1:11]).mean()
    return model, lambda: model(text[:, :-1], labels=text[:, 1:]).mean()


def _losses(flags: str) -> tuple[list[float], nn.Module, torch.optim.Optimizer]:
    config = parse(flags.split())
    model, loss = _model(config)
    optimizer, found = build_optimizer(group_keys(model, config.optim), config.optim, config.model.kernels), []
    for _ in range(6):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        found.append(value.item())
    return found, model, optimizer


@pytest.mark.parametrize(("flags", "norm"), [(FLAGS, FusedLayerNorm), (T5, FusedRMSNorm)], ids=["gpt2", "t5"])
def test_apex_learns_what_torch_learns(flags: str, norm: type[nn.Module], on_gpu: None) -> None:
    found, model, optimizer = _losses(flags)
    wanted, plain, torchs = _losses(f"{flags} --kernels torch")
    assert isinstance(optimizer, FusedAdam) and isinstance(torchs, torch.optim.AdamW)
    assert any(isinstance(m, norm) for m in model.modules()) and not any(isinstance(m, norm) for m in plain.modules())
    assert found == pytest.approx(wanted, rel=1e-9) and found[-1] < found[0] - 0.1
    assert list(model.state_dict()) == list(plain.state_dict())


def plain_engine(optimizer: torch.optim.Optimizer) -> Any:
    """Return a stand-in for a DeepSpeed engine without ZeRO, with the attributes that saving optimizer state needs."""
    return SimpleNamespace(optimizer=optimizer, zero_optimization_stage=lambda: 0)


def test_the_steps_that_apex_counts_go_into_checkpoints_and_come_back(on_gpu: None) -> None:
    engines = [plain_engine(_losses(f"{FLAGS} {more}")[2]) for more in ("", "--kernels torch")]
    for engine in engines:
        assert zero_state.get_step(engine) == 6
        assert zero_state.moment_names(engine) == ["exp_avg", "exp_avg_sq"]
    model, _ = _model(parse(FLAGS.split()))
    optim = parse(FLAGS.split()).optim
    fresh = plain_engine(build_optimizer(group_keys(model, optim), optim, "apex"))
    zero_state.make_moments(fresh, ["exp_avg", "exp_avg_sq"], 6, {})
    assert zero_state.get_step(fresh) == 6


def test_without_apex_or_gpu_torchs_are_taken_and_apex_is_refused(
    on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("apex", "apex.normalization", "apex.optimizers"):
        monkeypatch.setitem(sys.modules, module, None)
    assert kernels.apex_class("auto", "normalization", "FusedRMSNorm") is None
    with pytest.raises(ValueError, match=SENTENCES["fused_rms_norm_cannot_be_imported"]):
        kernels.apex_class("apex", "normalization", "FusedRMSNorm")
    monkeypatch.setattr(kernels, "_on_gpu", lambda: False)
    assert kernels.apex_class("auto", "normalization", "FusedLayerNorm") is None
    with pytest.raises(ValueError, match="--kernels"):
        kernels.apex_class("apex", "normalization", "FusedLayerNorm")


@pytest.mark.parametrize("fused", [True, False])
def test_counts_of_steps_are_made_where_torch_would_have_them(fused: bool) -> None:
    """`make_moments` creates step counts on the device that torch's `load_state_dict` uses.

    This is the weights' device if AdamW is fused, else the CPU.
    """
    weights = [nn.Parameter(torch.ones(4, device="meta")) for _ in range(2)]
    ours, theirs = (torch.optim.AdamW([weight], fused=fused) for weight in weights)
    zero_state.make_moments(plain_engine(ours), ["exp_avg", "exp_avg_sq"], 3, {})
    theirs.load_state_dict(ours.state_dict())
    found, wanted = (o.state[w]["step"] for o, w in zip((ours, theirs), weights, strict=True))
    assert found.device == wanted.device and found.dtype == wanted.dtype
