"""Defaults and learning-rate schedules of Megatron-LM: notes on differences, and equal curves one iteration later."""

import json
import math
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest
import torch

from megatron.config import Config
from megatron.config.command_line import HOME, parse
from megatron.config.defaults import DEFAULTS
from megatron.config.fields import ConfigError
from megatron.config.mup import muon_ratio
from megatron.model.router import Router
from megatron.optim import lr_at
from megatron_compat.flags.defaults import MEGATRON
from tests.support import ROOT

ROPE = "--use-rotary-position-embeddings --micro-batch-size 2"
LLAMA = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 "
    "--attention-dropout 0 --bf16 --lr-decay-style cosine --lr-warmup-iters 5 --split 1,0,0"
)


def taken(line: str, family: str = "llama") -> tuple[Config, list[str]]:
    notes: list[str] = []
    return parse(line.split(), DEFAULTS[family], 1, notes.append), notes


def value_of(config: Config, name: str) -> Any:
    return getattr(getattr(config, HOME[name]), name)


def advised(notes: list[str]) -> str:
    """Return the flags that a note on Megatron-LM's defaults names, or an empty string."""
    found = [re.search(r", add (.*?)(?: and use |$)", note) for note in notes]
    return " ".join(each[1] for each in found if each)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("more", ["", "--swiglu", "--hidden-dropout 0.2 --bf16", "--disable-bias-linear", LLAMA])
def test_what_a_line_of_megatron_leaves_open_is_named(family: str, more: str) -> None:
    """With the flags that the note names, a run has every default of Megatron-LM, and the note is gone."""
    line = f"{ROPE} {more}" if family == "llama" else f"--micro-batch-size 2 {more}"
    config, notes = taken(line, family)
    flags = advised(notes)
    again, rest = taken(f"{line} {flags}", family)
    assert advised(rest) == ""
    changed = {name for name in MEGATRON if value_of(again, name) != value_of(config, name)}
    assert all(value_of(again, name) == MEGATRON[name] or name == "activation" for name in changed)
    assert bool(changed) == bool(flags) == (more != LLAMA)
    if more == "" and family == "llama":
        assert changed > {"normalization", "activation", "hidden_bias", "tie_embeddings", "hidden_dropout"}
        assert again.model.activation == "gelu-tanh"
    if more == "--disable-bias-linear":
        assert again.model.activation == "gelu"  # Megatron-LM fuses no GELU without a bias


def test_lines_of_other_projects_get_no_note() -> None:
    assert taken("--batch-size 2 --position-embedding rope")[1] == []
    assert advised(taken("--fp16 --deepspeed --distributed-backend nccl", "gpt2")[1]) == ""


def test_a_gpt2_with_rotary_positions_names_the_way() -> None:
    with pytest.raises(ConfigError, match=r"pretrain_llama.py") as error:
        taken(ROPE, "gpt2")
    flags = re.findall(r"with (--.*)", str(error.value))[0]
    config, _ = taken(f"{ROPE} {flags}")
    usual = Config().model
    for name in ("normalization", "activation", "hidden_bias", "tie_embeddings", "hidden_dropout", "attention_dropout"):
        assert getattr(config.model, name) == getattr(usual, name)


def test_values_of_schedules_are_translated() -> None:
    config, notes = taken("--lr-decay-style WSD --lr-wsd-decay-iters 9")
    assert (config.optim.lr_decay_style, config.optim.lr_wsd_decay_style) == ("wsd", "exponential")
    assert len(notes) == 1
    for style, ours in (("minus_sqrt", "minus-sqrt"), ("linear", "linear")):
        config, _ = taken(f"--lr-decay-style WSD --lr-wsd-decay-style {style}")
        assert config.optim.lr_wsd_decay_style == ours
    assert taken("--lr-decay-style wsd")[0].optim.lr_wsd_decay_style == "minus-sqrt"


@pytest.mark.parametrize("flags", ["--lr-warmup-iters 3", "--lr-warmup-fraction 0.1", "--micro-batch-size 2"])
def test_the_other_start_of_the_curve_is_said(flags: str) -> None:
    assert any("first rate" in note for note in taken(flags)[1])


CORE = """
import inspect, json, sys
sys.path[:] = [p for p in sys.path if p not in ("", sys.argv[1])]  # our package has the same name
from types import SimpleNamespace
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func
from megatron.core.transformer.transformer_config import TransformerConfig
model = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
optimizer = OptimizerConfig()
gpt = {name: p.default for name, p in inspect.signature(GPTModel).parameters.items()}
names = ("normalization", "add_bias_linear", "add_qkv_bias", "gated_linear_unit", "hidden_dropout", "qk_layernorm",
         "attention_dropout", "layernorm_epsilon", "init_method_std", "fp16", "bf16")
found = {name: getattr(model, name) for name in names}
found["activation"] = model.activation_func.__name__
found |= {name: getattr(optimizer, name) for name in ("weight_decay", "adam_beta1", "adam_beta2", "adam_eps")}
found |= {name: gpt[name] for name in ("position_embedding_type", "rotary_base", "rotary_percent")}
curves = []
for style, wsd in json.loads(sys.argv[2]):
    group = {"lr": 0.0, "weight_decay": 0.0}
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]), init_lr=0.0, max_lr=1.0, min_lr=0.1, lr_warmup_steps=5,
        lr_decay_steps=40, lr_decay_style=style, start_wd=0.0, end_wd=0.0, wd_incr_steps=40,
        wd_incr_style="constant", wsd_decay_steps=15, lr_wsd_decay_style=wsd,
    )
    rates = []
    for _ in range(40):
        rates.append(group["lr"])
        scheduler.step(1)
    curves.append(rates)
probs, counts = (torch.tensor(each, dtype=torch.float64) for each in json.loads(sys.argv[3]))
loss = switch_load_balancing_loss_func(
    probs=probs, tokens_per_expert=counts, total_num_tokens=len(probs), topk=2, num_experts=4, moe_aux_loss_coeff=0.5
)
print(json.dumps([found, curves, float(loss)]))
"""
STYLES = [("cosine", None), ("linear", None), ("constant", None)] + [
    ("WSD", style) for style in ("exponential", "linear", "cosine", "minus_sqrt")
]


@pytest.mark.slow
def _router_loss() -> tuple[list[list[float]], list[int], float]:
    """Return probabilities [tokens, 4] of experts, the tokens of each expert, and our router's loss by these shares."""
    config = taken("--num-experts 4 --router-aux-loss 0.5 --init-method-std 1")[0].model
    router = Router(config, "router").double().train()
    hidden = torch.randn(29, 4, config.hidden_size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    router(hidden)
    router.end_step(router.step_tokens)  # our next loss uses the shares of this step, as theirs does at once
    loss = router(hidden).loss
    probabilities = (hidden.flatten(0, 1) @ router.weight.t()).softmax(-1)
    return probabilities.tolist(), router.tokens.tolist(), loss.item()


def test_defaults_and_curves_are_those_of_megatron_core() -> None:
    try:
        version("megatron-core")
    except PackageNotFoundError:
        pytest.skip("needs megatron-core")
    probabilities, counts, router_loss = _router_loss()
    argv = [sys.executable, "-c", CORE, str(ROOT), json.dumps(STYLES), json.dumps([probabilities, counts])]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    theirs, curves, theirs_router_loss = json.loads(done.stdout.splitlines()[-1])
    assert theirs_router_loss == pytest.approx(router_loss, rel=1e-6)  # our shares of the experts are in fp32
    ours = dict(MEGATRON)
    assert theirs.pop("activation") == "gelu" and not theirs.pop("gated_linear_unit")
    assert (theirs.pop("fp16"), theirs.pop("bf16"), ours["precision"]) == (False, False, "fp32")
    assert (theirs.pop("normalization"), ours["normalization"]) == ("LayerNorm", "layernorm")
    assert (theirs.pop("position_embedding_type"), ours["position_embedding"]) == ("learned_absolute", "learned")
    assert theirs.pop("add_bias_linear") is ours["hidden_bias"] and not theirs.pop("add_qkv_bias")
    assert theirs.pop("qk_layernorm") is ours["qk_norm"]
    assert theirs.pop("rotary_base") == ours["rope_theta"]
    assert theirs == {name: ours[name] for name in theirs}
    for (style, wsd), rates in zip(STYLES, curves, strict=True):
        line = f"--lr 1 --min-lr 0.1 --lr-warmup-iters 5 --lr-decay-iters 40 --train-iters 40 --lr-decay-style {style}"
        line += f" --lr-wsd-decay-style {wsd} --lr-wsd-decay-iters 15" if wsd else ""
        config, _ = taken(line)
        assert rates[0] == 0
        assert [lr_at(i, config) for i in range(39)] == pytest.approx(rates[1:], abs=1e-12), (style, wsd)


@pytest.mark.parametrize(
    ("more", "is_open"),
    [
        ("", False),
        ("--num-experts 4", True),
        ("--num-experts 4 --moe-aux-loss-coeff 0.01", False),
        ("--num-experts 4 --moe-router-load-balancing-type none", False),
    ],
)
def test_a_line_of_megatron_with_experts_leaves_their_auxiliary_loss_open(more: str, is_open: bool) -> None:
    _, notes = taken(f"--micro-batch-size 2 {more}", "gpt2")
    assert ("--router-aux-loss 0.0" in advised(notes)) == is_open


def test_a_t5_of_megatron_leaves_only_training_open() -> None:
    """The note lists no settings of the model, as Megatron-LM's T5 is another one."""
    _, notes = taken("--micro-batch-size 2", "t5")
    assert advised(notes) == "--precision fp32 --lr-decay-style linear --warmup 0.0 --split 969,30,1"


@pytest.mark.parametrize("factor", ["", "--muon-lr-factor 5"])
def test_a_line_of_megatron_with_muon(factor: str) -> None:
    """The scale of Megatron-LM's mode spectral, its default, is sqrt(max(o, i)), without the factor 0.2 of AdamW."""
    line = f"--micro-batch-size 2 --optimizer muon --precision fp32 {factor}"
    config, notes = taken(line, "gpt2")
    assert "--muon-momentum 0.9 --no-muon-nesterov" in advised(notes)
    assert "muon" not in advised(taken("--micro-batch-size 2", "gpt2")[1])
    assert any("--muon-lr-factor 5" in note for note in notes)
    scale = muon_ratio((64, 16), config.optim.muon_adjust_lr_fn) * config.optim.muon_lr_factor
    assert math.isclose(scale, math.sqrt(64)) == (factor != "")
