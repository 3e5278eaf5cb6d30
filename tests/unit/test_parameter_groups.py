"""Weight decay applies to matrices and, unless excluded, to embeddings; --param-groups sets it by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from megatron.config.command_line import parse
from megatron.config.fields import ConfigError
from megatron.config.param_groups import ParamRule, describe_rules, match_rules, read_param_rules
from megatron.model import GPT2Model, T5Model, global_parameters
from megatron.model.muon_parameters import embedding_weights
from megatron.optim import build_optimizer, group_keys

SIZES = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 40"


def _decaying(model: nn.Module, embeddings: bool) -> set[str]:
    names = {p: name for name, p in global_parameters(model)}
    optim = parse(["--weight-decay", "0.1"]).optim
    keys = group_keys(model, optim, () if embeddings else embedding_weights(model))
    decays, others = build_optimizer(keys, optim).param_groups
    assert (decays["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert {*decays["params"], *others["params"]} == set(names)
    return {names[p] for p in decays["params"]}


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_may_be_left_out(tied: bool) -> None:
    """Embeddings can be excluded from weight decay; an untied output matrix does not count as an embedding."""
    model = GPT2Model(parse(f"{SIZES} {'' if tied else '--no-tie-embeddings'}".split()))
    left_out = {"embedding.word_embeddings.weight", "position_embedding.weight"}
    everything = {name for name, p in global_parameters(model) if p.dim() > 1}
    assert _decaying(model, True) == everything
    assert _decaying(model, False) == everything - left_out
    assert ("head.word_embeddings.weight" in everything) != tied


def test_of_t5_those_of_positions_too() -> None:
    model = T5Model(parse(f"{SIZES} --family t5 --enc-seq-length 8 --dec-seq-length 8".split()))
    left_out = {"embedding.word_embeddings.weight", "encoder.start.weight", "decoder.start.weight"}
    assert _decaying(model, True) - _decaying(model, False) == left_out


def _read(folder: Path, content: Any) -> tuple[ParamRule, ...]:
    file = folder / "groups.json"
    file.write_text(json.dumps(content))
    return read_param_rules(str(file))


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"pattern": "*"}, "list"),
        ([], "empty"),
        (["*"], "pattern"),
        ([{"lr_factor": 1}], "pattern"),
        ([{"pattern": "*"}], "sets nothing"),
        ([{"pattern": "*", "lr_factr": 1}], "lr_factor"),
        ([{"pattern": "*", "lr_factor": -1}], "lr_factor"),
        ([{"pattern": "*", "lr_factor": 10**400}], "digits"),
        ([{"pattern": "*", "lr_factor": True}], "lr_factor"),
        ([{"pattern": "*", "weight_decay": "0"}], "weight_decay"),
        ([{"pattern": "*", "frozen": 1}], "frozen"),
        ([{"pattern": "*", "frozen": True, "lr_factor": 2}], "frozen"),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path: Path, content: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        _read(tmp_path, content)


def test_later_rules_override_key_by_key(tmp_path: Path) -> None:
    rules = _read(
        tmp_path,
        [
            {"pattern": "layers.*", "lr_factor": 2, "weight_decay": 0.5},
            {"pattern": "layers.1.*", "frozen": True},
            {"pattern": "*.bias", "weight_decay": 0},
        ],
    )
    found = match_rules(rules, ["layers.0.weight", "layers.1.bias", "head.weight"])
    assert {name: rule[1:] for name, rule in found.items()} == {
        "layers.0.weight": (2, 0.5, None),
        "layers.1.bias": (2, 0, True),
    }


def test_unmatched_patterns_and_weights_are_named() -> None:
    sizes = {"layers.0.weight": 3_000_000, "head.weight": 1_000_000}
    rules = [ParamRule("layers.*", lr_factor=0.5), ParamRule("heads.*", frozen=True)]
    with pytest.raises(ValueError, match=r"heads\.\*"):
        describe_rules("groups.json", rules, sizes)
    counted, others = describe_rules("groups.json", rules[:1], sizes)
    assert "layers.*" in counted and "1 weight, 3.00 million" in counted
    assert "1 weight, 1.00 million" in others
    with pytest.raises(ValueError, match="--param-groups"):
        describe_rules("groups.json", [ParamRule("*", frozen=True)], sizes)
