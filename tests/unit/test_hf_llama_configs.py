"""Imported Llama, Qwen2, Qwen3 and Mistral give transformers' logits to 1e-5; other configurations are refused."""

import copy
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config import ModelConfig
from megatron.config.command_line import parse
from megatron.config.fields import ConfigError
from megatron_tools.convert.hf_config import read_config, settings_from_hf
from megatron_tools.convert.hf_experts import unexported_notes
from megatron_tools.convert.hf_folder import HFModelFolder, export_entries
from megatron_tools.convert.hf_llama import FAMILIES, llama_config
from megatron_tools.convert.hf_names import parameter_matches
from tests.support import covering
from tests.unit.test_hf_configs import (
    LLAMA,
    Case,
    Edit,
    difference,
    extra,
    gone,
    new_head,
    nothing,
    old,
    only,
    write,
)  # fmt: skip

KINDS = ("llama", "qwen2", "qwen3", "mistral")
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 500.0},
    "linear": {"rope_theta": 10000.0, "factor": 3.0},
    "llama3": {
        "rope_theta": 300.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 12,
    },
    "yarn": {"rope_theta": 1000, "factor": 4.0, "original_max_position_embeddings": 16},
}
YARNS: tuple[dict[str, Any], ...] = (
    {"beta_fast": 2.0, "beta_slow": 0.25},
    {"attention_factor": 0.7},
    {"mscale": 0.7, "mscale_all_dim": 1.3},
    {"mscale": 0.7},
    {"beta_fast": None, "beta_slow": None, "attention_factor": None},
    {"factor": None},
    {"factor": 1.0},
    {"truncate": True},
    {"original_max_position_embeddings": 3},
    {"original_max_position_embeddings": 1, "rope_theta": 2.0},
    {"rope_theta": 1.2, "original_max_position_embeddings": 4000},
)


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, **ROPES[kind], **more}}


def as_before(key: str) -> Edit:
    """Return an edit that writes RoPE settings as transformers 4 did, with the scaling's type under the key `key`."""

    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        content = config.pop("rope_parameters")
        config["rope_theta"] = content.pop("rope_theta")
        kind = content.pop("rope_type")
        config["rope_scaling"] = None if kind == "default" else {key: kind, **content}
        config["torch_dtype"] = config.pop("dtype", "float32")

    return edit


def said_twice(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write RoPE settings under two keys: transformers 5's and transformers 4's, `rope_scaling`, which has priority."""
    theta = config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    config["rope_scaling"] = {"type": "linear", "factor": 3.0} | ({} if theta == 10000.0 else {"rope_theta": theta})


def without_prefix(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Remove the prefix `model.`, as in LlamaModel, and add `inv_freq`, which the first Llama files contain."""
    for key in list(tensors):
        tensors[key.removeprefix("model.")] = tensors.pop(key)
    for i in range(config["num_hidden_layers"]):
        tensors[f"layers.{i}.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
    config["architectures"] = [config["architectures"][0].replace("ForCausalLM", "Model")]


def right() -> Iterator[Case]:
    tied = {"tie_word_embeddings": True}
    for kind, groups, tie in itertools.product(KINDS, (1, 2, 4, 8), (True, False)):
        yield kind, {"num_key_value_heads": groups, "tie_word_embeddings": tie}, nothing, "float32"
    for kind, name in itertools.product(KINDS, ROPES):
        yield kind, rope(name), nothing, "float32"
        yield kind, rope(name), as_before("rope_type" if kind == "llama" else "type"), "float32"
    for more in YARNS:
        yield "llama", rope("yarn", **more), nothing, "float32"
    for low, high in ((1.0, 2.0), (0.5, 8.0)):
        yield "llama", rope("llama3", low_freq_factor=low, high_freq_factor=high), nothing, "float32"
    for kind, dtype in itertools.product(KINDS, ("bfloat16", "float16")):
        yield kind, {}, nothing, dtype
    for kind in KINDS:
        yield kind, {}, old(tie_word_embeddings=..., rms_norm_eps=..., hidden_act=..., attention_dropout=...), "float32"
        yield kind, {}, old(pad_token_id=3, eos_token_id=[2, 5], bos_token_id=1, use_cache=False), "float32"
        yield kind, tied, only("lm_head.weight"), "float32"
        yield kind, tied, new_head, "float32"
        yield kind, tied, without_prefix, "float32"
        yield kind, {"rms_norm_eps": 0.01, "num_hidden_layers": 1}, nothing, "float32"
    for act, kind in itertools.product(("swish", "gelu_new", "gelu_pytorch_tanh"), ("llama", "qwen3")):
        yield kind, {"hidden_act": act}, nothing, "float32"
    yield "llama", {"attention_bias": True, "mlp_bias": True}, nothing, "float32"
    yield (
        "llama",
        {"head_dim": None, "num_key_value_heads": None},
        old(head_dim=..., num_key_value_heads=None),
        "float32",
    )
    yield "llama", {}, old(pretraining_tp=2, rope_scaling=None), "float32"
    yield "qwen2", {"head_dim": 4}, old(head_dim=..., use_mrope=False), "float32"
    for window in (None, 1, 5, 22, 4096):
        yield "mistral", {"sliding_window": window}, nothing, "float32"
    slides = {"use_sliding_window": True, "sliding_window": 5}
    for kind in ("qwen2", "qwen3"):
        yield kind, {**slides, "max_window_layers": 0}, nothing, "float32"
        yield kind, {**slides, "max_window_layers": 0}, old(layer_types=...), "float32"
        yield kind, {**slides, "max_window_layers": 28}, old(layer_types=...), "float32"
        yield kind, {"sliding_window": 5}, old(sliding_window=5, layer_types=...), "float32"
    for kind, sizes in itertools.product(
        ("qwen3", "mistral"), ((33, 3, 1, 10, 7), (20, 6, 3, 2, 13), (14, 7, 7, 4, 9))
    ):
        names = "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"
        yield kind, dict(zip(names, sizes, strict=True)), nothing, "float32"
    for kind, theta in itertools.product(KINDS, (500.0, 10000.0)):
        yield kind, rope("linear", rope_theta=theta), said_twice, "float32"
    for seed in range(40):
        yield by_chance(random.Random(seed))


def by_chance(dice: random.Random) -> Case:
    """Return a case with random sizes, RoPE scaling, windows, biases, file format and dtype."""
    kind, heads, name = dice.choice(KINDS), dice.choice((1, 2, 3, 4, 6, 8)), dice.choice(list(ROPES))
    settings: dict[str, Any] = {
        "hidden_size": heads * dice.choice((2, 3, 5, 8)),
        "num_attention_heads": heads,
        "head_dim": 2 * dice.randint(1, 9),
        "num_key_value_heads": dice.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "intermediate_size": dice.randint(1, 50),
        "num_hidden_layers": dice.randint(1, 3),
        "vocab_size": dice.randint(60, 300),
        "tie_word_embeddings": dice.random() < 0.5,
        "hidden_act": dice.choice(("silu", "silu", "gelu_new")),
        "rms_norm_eps": dice.choice((1e-6, 1e-5, 1e-3)),
        "max_position_embeddings": dice.choice((23, 64, 8192)),
        **rope(name, rope_theta=dice.choice((100.0, 1e4, 5e5, 1000000))),
    }
    if kind == "mistral":
        settings["sliding_window"] = dice.choice((None, 2, 7, 64))
    if kind.startswith("qwen") and dice.random() < 0.5:
        settings |= {"use_sliding_window": True, "sliding_window": dice.choice((3, 9)), "max_window_layers": 0}
    if kind == "llama" and dice.random() < 0.5:
        settings |= {"attention_bias": True, "mlp_bias": True}
    edit = dice.choice((nothing, as_before("rope_type"), as_before("type")))
    return kind, settings, edit, dice.choice(("float32", "float32", "bfloat16"))


CASES = list(right())


@pytest.mark.slow
@pytest.mark.parametrize("number", covering(range(len(CASES)), lambda number: number % 2 == 0))
def test_it_is_right_and_comes_back(number: int, tmp_path: Path) -> None:
    """An imported model has transformers' logits, and exporting it gives bit-identical weights."""
    family, settings, edit, dtype = CASES[number]
    write(tmp_path, family, settings, edit, dtype)
    assert difference(tmp_path, family) <= 1e-5
    check_return(HFModelFolder(tmp_path))


def check_return(theirs: HFModelFolder) -> None:
    m = theirs.config.model
    ours = {
        match.our_name: match.join([theirs.tensors.read(name) for name in match.their_names])
        for match in theirs.matches
    }
    for entry in export_entries(parameter_matches(m), ours.__getitem__, lambda name: ours[name].shape, "fp32"):
        assert torch.equal(entry.build(), theirs.tensors.read(entry.name)), entry.name
    described = json.loads(json.dumps(llama_config(m, theirs.config.positions, 1, 2, "fp32")))
    again, _ = settings_from_hf(read_config(described, Path("config.json")), m.tie_embeddings, Path("config.json"))
    left = {"seq_length", "kv_hidden_size", "qkv_bias", "num_key_value_heads"}
    assert {name: getattr(m, name) for name in again if name not in left} == {
        name: value for name, value in again.items() if name not in left
    }
    assert (again["kv_hidden_size"], again["num_key_value_heads"]) == (m.head_size, m.key_value_heads)
    assert again["qkv_bias"] == m.has_qkv_bias


REFUSED: list[tuple[str, Edit, str]] = [
    (
        "llama",
        old(architectures=["LlamaForSequenceClassification"]),
        "architectures names LlamaForSequenceClassification",
    ),
    ("llama", old(model_type="llama4"), "model_type is 'llama4'"),
    ("llama", old(quantization_config={"bits": 4}), "the key quantization_config"),
    ("llama", old(hidden_act="gelu"), "hidden_act is gelu; of gated MLPs only those with silu, swish,"),
    ("llama", old(hidden_act="relu"), "hidden_act is relu"),
    ("llama", old(attention_bias=True), "attention_bias is True and mlp_bias False; a model must have biases in all"),
    ("llama", old(mlp_bias=True), "attention_bias is False and mlp_bias True"),
    ("llama", old(attention_bias=True, mlp_bias=True), "no tensor model.layers.0.self_attn."),
    ("llama", old(sliding_window=8), "the key sliding_window (8) is unknown"),
    ("llama", old(partial_rotary_factor=0.5), "the key partial_rotary_factor (0.5) is unknown"),
    ("llama", old(original_max_position_embeddings=8), "the key original_max_position_embeddings (8)"),
    ("llama", old(num_key_value_heads=4), "but config.json implies"),
    ("llama", old(num_key_value_heads=3), "--num-key-value-heads 3"),
    ("llama", old(num_key_value_heads="2"), "num_key_value_heads is '2', not of type int"),
    ("llama", old(head_dim=8), "but config.json implies"),
    ("llama", old(head_dim=5), "rotary positions rotate pairs of dimensions"),
    ("llama", old(intermediate_size=21), "but config.json implies"),
    ("llama", old(vocab_size=99), "model.embed_tokens.weight has shape [61, 32], but config.json implies [99, 32]"),
    ("llama", old(num_hidden_layers=1), "model in config.json: model.layers.1."),
    ("llama", old(num_hidden_layers=3), "no tensor model.layers.2."),
    ("llama", gone("lm_head.weight"), "has tie_word_embeddings false, but the files contain no lm_head.weight"),
    ("llama", gone("model.norm.weight"), "no tensor model.norm.weight"),
    (
        "llama",
        extra("model.layers.0.self_attn.q_norm.weight"),
        "model in config.json: model.layers.0.self_attn.q_norm.weight",
    ),
    (
        "llama",
        extra("model.layers.0.self_attn.q_proj.bias"),
        "model in config.json: model.layers.0.self_attn.q_proj.bias",
    ),
    (
        "llama",
        old(rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
        "has the scaling type 'dynamic'",
    ),
    (
        "llama",
        old(rope_parameters={"rope_type": "longrope"}),
        "'longrope'; only default, linear, llama3, yarn can be converted",
    ),
    ("llama", old(rope_parameters=None, rope_scaling={"type": "mrope"}), "rope_scaling has the scaling type 'mrope'"),
    ("llama", old(rope_parameters=None, rope_scaling={"type": 3}), "rope_scaling has the scaling type 3"),
    ("llama", old(rope_parameters=None, rope_scaling=[2]), "rope_scaling is [2], not of type dict"),
    ("llama", old(rope_parameters={"rope_type": "linear"}), "factor of rope_parameters is None, not a number"),
    ("llama", old(rope_parameters={"rope_type": "linear", "factor": 0.5}), "--rope-scaling-factor 0.5"),
    ("llama", old(rope_parameters={"rope_type": "linear", "factor": "2"}), "factor of rope_parameters is '2'"),
    (
        "llama",
        old(rope_parameters={"rope_type": "default", "factor": 2.0}),
        "the key factor of rope_parameters has no effect",
    ),
    (
        "llama",
        old(rope_parameters={"rope_type": "linear", "type": "yarn", "factor": 2.0}),
        "type 'yarn' but rope_type 'linear'",
    ),
    (
        "llama",
        old(rope_parameters={"rope_type": "yarn", "factor": 2.0, "truncate": False}),
        "truncate of rope_parameters is False",
    ),
    (
        "llama",
        old(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}),
        "partial_rotary_factor of rope_parameters is 0.5",
    ),
    ("llama", old(rope_parameters={"rope_type": "default", "rope_theta": "1"}), "rope_theta of rope_parameters is '1'"),
    ("llama", old(rope_theta=7.0), "rope_theta is 7.0, but in rope_parameters it is 10000.0"),
    (
        "llama",
        old(rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"rope_type": "yarn", "factor": 3.0}),
        "must be equal",
    ),
    (
        "llama",
        old(
            rope_scaling={"type": "linear", "factor": 2.0},
            rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
        ),
        "rope_theta is 10000.0 in the former and 1000000.0 in the latter; remove one of them",
    ),
    (
        "llama",
        old(
            rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
        ),
        "rope_type is 'linear' in the former and 'default' in the latter",
    ),
    (
        "llama",
        old(
            rope_scaling={"type": "yarn", "factor": 2.0},
            rope_parameters={"rope_type": "yarn", "factor": 2.0, "beta_fast": 9.0},
        ),
        "beta_fast is None in the former and 9.0 in the latter",
    ),
    ("llama", old(rope_parameters={"full_attention": {"rope_type": "default"}}), "differ between layers"),
    (
        "llama",
        old(rope_parameters={"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}),
        "--rope-high-freq-factor 1",
    ),
    (
        "llama",
        old(rope_parameters={"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 0, "high_freq_factor": 1.0}),
        "--rope-low-freq-factor 0.0 must be more than 0",
    ),
    (
        "llama",
        old(rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}),
        "--rope-theta 1 must be more than 1",
    ),
    (
        "qwen2",
        old(use_sliding_window=True, sliding_window=5, max_window_layers=None, layer_types=...),
        "max_window_layers is null",
    ),
    ("qwen2", old(attention_bias=True), "the key attention_bias (True) is unknown"),
    ("qwen2", old(use_mrope=True), "use_mrope is True; this project supports only False"),
    (
        "qwen2",
        old(use_sliding_window=True, sliding_window=5, max_window_layers=1, layer_types=...),
        "(or max_window_layers 1) must give all 2 layers",
    ),
    (
        "qwen3",
        old(layer_types=["full_attention", "sliding_attention"]),
        "full_attention or sliding_attention",
    ),
    ("qwen3", old(layer_types=["full_attention"]), "must give all 2 layers"),
    ("qwen3", old(layer_types=["chunked_attention"] * 2), "full_attention or sliding_attention"),
    (
        "qwen3",
        old(layer_types=["sliding_attention"] * 2),
        "layer_types are sliding_attention, but sliding_window is None",
    ),
    ("qwen3", old(attention_bias=True), "attention_bias is True; a model must have biases in all"),
    ("qwen3", gone("model.layers.1.self_attn.k_norm.weight"), "no tensor model.layers.1.self_attn.k_norm.weight"),
    ("mistral", old(layer_types=["full_attention"] * 2), "layer_types are full_attention, but sliding_window is 4096"),
    ("mistral", old(mlp_bias=True), "the key mlp_bias (True) is unknown"),
    ("mistral", old(sliding_window=0), "--sliding-window 0"),
    ("mistral", old(num_local_experts=8), "the key num_local_experts (8)"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_it_is_refused_by_name(number: int, tmp_path: Path) -> None:
    family, edit, message = REFUSED[number]
    write(tmp_path, family, {}, edit, "float32")
    with pytest.raises(ValueError) as found:
        HFModelFolder(tmp_path)
    assert message in str(found.value)
    assert "\n" not in str(found.value)


def test_there_are_enough_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f" {len(CASES)} configurations right to 1e-5, {len(REFUSED)} refused by name ", end="")
    assert len(CASES) >= 150 and len(REFUSED) >= 50


USUAL = (
    "--family llama --position-embedding rope --normalization rmsnorm --activation swiglu --no-hidden-bias "
    "--hidden-size 48"
)


def model(flags: str) -> ModelConfig:
    return parse(f"{USUAL} {flags}".split()).model


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ("", "llama"),
        ("--hidden-bias", "llama"),
        ("--kv-hidden-size 6", "llama"),
        ("--activation gated-gelu", "llama"),
        ("--num-attention-heads 5 --kv-hidden-size 6", "mistral"),
        ("--sliding-window 8", "mistral"),
        ("--qkv-bias", "qwen2"),
        ("--qkv-bias --sliding-window 8", "qwen2"),
        ("--qk-norm", "qwen3"),
        ("--qk-norm --sliding-window 8", "qwen3"),
    ],
)
def test_the_class_follows_from_the_settings(flags: str, kind: str) -> None:
    assert llama_config(model(flags), 64, 0, 0, "fp32")["model_type"] == kind


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--normalization layernorm", "Llama does not support --normalization layernorm"),
        ("--activation relu", "Llama does not support --activation relu"),
        ("--rotary-percent 0.5", "Llama does not support --rotary-percent 0.5"),
        ("--no-scale-attention", "Llama does not support --no-scale-attention"),
        ("--hidden-bias --no-qkv-bias", "Llama does not support --no-qkv-bias"),
        ("--hidden-bias --sliding-window 8", "Mistral does not support --hidden-bias"),
        ("--hidden-bias --num-attention-heads 5 --kv-hidden-size 6", "Mistral does not support --hidden-bias"),
        ("--hidden-bias --qk-norm", "Qwen3 does not support --hidden-bias"),
        ("--qkv-bias --qk-norm", "Qwen3 does not support --qkv-bias"),
    ],
)
def test_what_none_of_theirs_is(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"{message}$"):
        llama_config(model(flags), 64, 0, 0, "fp32")


def test_a_number_of_layers_without_windows_is_read_where_there_are_windows() -> None:
    """`max_window_layers: null` means no sliding window in a Qwen2's config.json of transformers 4."""
    read = read_config({"model_type": "qwen2", "max_window_layers": None}, Path("config.json"))
    assert settings_from_hf(read, False, Path("config.json"))[0]["sliding_window"] is None


def test_transformers_forgets_rope_parameters_beside_rope_scaling() -> None:
    """A config.json with `rope_parameters` and `rope_scaling` is refused if it gives two different values of theta.

    If both keys are present, transformers ignores `rope_parameters` and reads theta from the key `rope_theta`.
    """
    import transformers

    both = {
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
    }
    for given, theta in ((both, 10000.0), ({**both, "rope_theta": 1e6}, 1e6)):
        theirs = transformers.LlamaConfig.from_dict(copy.deepcopy(given))
        assert theirs.rope_parameters["rope_theta"] == theta
        read = read_config({"model_type": "llama", **given}, Path("config.json"))
        if theta != 1e6:
            with pytest.raises(ValueError, match="rope_theta is 10000.0 in the former and 1000000.0"):
                settings_from_hf(read, False, Path("config.json"))
        else:
            assert settings_from_hf(read, False, Path("config.json"))[0]["rope_theta"] == theta


def test_defaults_are_theirs() -> None:
    """A key that config.json lacks is read as transformers' default."""
    import transformers

    for kind in FAMILIES:
        theirs = transformers.AutoConfig.for_model(kind)
        read = read_config({"model_type": kind}, Path("config.json"))
        for key, value in read.items():
            if value is None or key in ("rope_theta", "decoder_start_token_id", "sliding_window", "head_dim"):
                continue
            assert getattr(theirs, key) == value, (kind, key)
    assert LLAMA["num_hidden_layers"] == 2


@pytest.mark.parametrize(("flags", "count"), [("linear", 0), ("yarn --rope-original-length 16", 1)])
def test_an_export_prints_a_note_about_releases_that_read_yarn_differently(flags: str, count: int) -> None:
    scaled_model = model(f"--rope-scaling-factor 4 --hidden-dropout 0 --rope-scaling {flags}")
    assert len(list(unexported_notes(scaled_model))) == count
