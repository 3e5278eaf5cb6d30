"""Imported GPT-2 and T5 models give transformers' logits to 1e-5; unsupported configurations are refused.

The tested folders have the keys and tensor names of transformers 5 or of transformers 4.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.command_line import parse
from megatron.config.fields import ConfigError
from megatron.model import GPT2Model, T5Model
from megatron_tools.convert.hf_compare import compare_with_hf
from megatron_tools.convert.hf_config import gpt2_config, logit_scale_notes, read_config, settings_from_hf, t5_config
from megatron_tools.convert.hf_folder import HEAD_NAME, HFModelFolder
from tests.support import covering

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

GPT2 = {"vocab_size": 61, "n_positions": 24, "n_embd": 16, "n_layer": 2, "n_head": 4}
LLAMA = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 24,
}  # fmt: skip
EXPERTS = {**LLAMA, "num_experts_per_tok": 2}
SMALL = {"num_experts": 5, "moe_intermediate_size": 12}
T5 = {"vocab_size": 61, "d_model": 16, "d_kv": 6, "d_ff": 20, "num_layers": 2, "num_heads": 2, "num_decoder_layers": 3}
KINDS = {
    "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel, GPT2),
    "t5": (transformers.T5Config, transformers.T5ForConditionalGeneration, T5),
    "mt5": (transformers.MT5Config, transformers.MT5ForConditionalGeneration, T5),
    "umt5": (transformers.UMT5Config, transformers.UMT5ForConditionalGeneration, T5),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, LLAMA),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, LLAMA),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, LLAMA),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, LLAMA),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM, {**EXPERTS, "num_local_experts": 5}),
    "qwen2_moe": (
        transformers.Qwen2MoeConfig,
        transformers.Qwen2MoeForCausalLM,
        {**EXPERTS, **SMALL, "shared_expert_intermediate_size": 24},
    ),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM, {**EXPERTS, **SMALL}),
}
EMBEDDINGS = ("transformer.wte.weight", "shared.weight", "model.embed_tokens.weight")
Edit = Callable[[dict[str, Any], dict[str, Tensor]], None]


def nothing(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    pass


def new_head(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    embedding = next(tensors[name] for name in EMBEDDINGS if name in tensors)
    tensors["lm_head.weight"] = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(2))


def tied_twice(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Store a T5's embedding also under the names of its tied weights, as transformers 4 did."""
    for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors["shared.weight"].clone()


def dead_table(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Add the unused relative-position table for cross-attention that t5-small's checkpoint has."""
    of_decoder = tensors["decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
    tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = of_decoder + 1


def only(name: str) -> Edit:
    """Return an edit that stores the embedding as `name` instead of its usual name."""

    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for key in EMBEDDINGS:
            if key in tensors:
                tensors[name] = tensors.pop(key)

    return edit


def without_prefix(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Remove the prefix `transformer.` and add constant mask tensors, as in GPT2Model and the first GPT-2 files."""
    for key in [key for key in tensors if key.startswith("transformer.")]:
        tensors[key.removeprefix("transformer.")] = tensors.pop(key)
    for i in range(config["n_layer"]):
        tensors[f"h.{i}.attn.bias"] = torch.ones(24, 24).tril().view(1, 1, 24, 24)
        tensors[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    config["architectures"] = ["GPT2Model"]


def by_aliases(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    names = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    names |= {"d_model": "hidden_size", "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}
    for key, alias in names.items():
        if key in config:
            config[alias] = config.pop(key)


def old(**keys: Any) -> Edit:
    """Return an edit that sets keys of config.json, or removes those whose value is `...`."""

    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config.update({key: value for key, value in keys.items() if value is not ...})
        for key in [key for key, value in keys.items() if value is ...]:
            config.pop(key, None)

    return edit


def both(*edits: Edit) -> Edit:
    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for each in edits:
            each(config, tensors)

    return edit


Case = tuple[str, dict[str, Any], Edit, str]  # model family, config settings, edit of the saved files, dtype


def right() -> Iterator[Case]:
    tanh = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_accurate")
    for activation, inner in itertools.product((*tanh, "gelu", "gelu_python", "relu"), (None, 24)):
        yield "gpt2", {"activation_function": activation, "n_inner": inner}, nothing, "float32"
    for scale, eps, heads in itertools.product((True, False), (1e-5, 1e-3), (1, 4)):
        yield "gpt2", {"scale_attn_weights": scale, "layer_norm_epsilon": eps, "n_head": heads}, nothing, "float32"
    for dtype in ("float32", "bfloat16", "float16"):
        for edit in (
            new_head,
            without_prefix,
            only("lm_head.weight"),
            by_aliases,
            old(tie_word_embeddings=..., n_ctx=24),
        ):
            yield "gpt2", {}, edit, dtype
    yield "gpt2", {"reorder_and_upcast_attn": True}, nothing, "float32"
    yield "gpt2", {}, old(torch_dtype="float32", dtype=..., output_past=True, task_specific_params={"x": 1}), "float32"
    yield "gpt2", {}, old(activation_function=..., layer_norm_epsilon=..., n_inner=..., resid_pdrop=...), "float32"
    yield "gpt2", {"n_layer": 1, "n_embd": 12, "n_head": 3, "vocab_size": 130}, new_head, "float32"
    projections = ("relu", "gelu", "gelu_new", "gated-gelu", "gated-gelu_new", "gated-silu")
    for family, project, edit in itertools.product(
        ("t5", "mt5", "umt5"), projections, (nothing, new_head, tied_twice, only("encoder.embed_tokens.weight"))
    ):
        yield family, {"feed_forward_proj": project}, edit, "float32"
    for family, dtype in itertools.product(("t5", "mt5", "umt5"), ("bfloat16", "float16")):
        for edit in (nothing, new_head, only("lm_head.weight"), by_aliases):
            yield family, {"feed_forward_proj": "gated-gelu"}, edit, dtype
    for tied, edit in itertools.product((True, False), (nothing, new_head)):
        if tied or edit is new_head:
            yield "t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": tied}, edit, "float32"
    for scaled, edit in itertools.product((True, False), (nothing, new_head)):
        yield "t5", {"scale_decoder_outputs": scaled}, edit, "float32"
    # transformers 4 saved T5 v1.1 with tie_word_embeddings false and an untied head, without scale_decoder_outputs.
    four = old(
        tie_word_embeddings=False, scale_decoder_outputs=..., dense_act_fn=..., is_gated_act=..., n_positions=512
    )
    yield "t5", {"feed_forward_proj": "gated-gelu"}, both(new_head, four), "float32"
    yield (
        "mt5",
        {},
        both(new_head, old(tie_word_embeddings=False, architectures=["MT5ForConditionalGeneration"])),
        "float32",
    )
    for eps, buckets in itertools.product((1e-6, 1e-2), (8, 32)):
        yield "t5", {"layer_norm_epsilon": eps, "relative_attention_num_buckets": buckets}, nothing, "float32"
    yield "t5", {"relative_attention_max_distance": 17}, nothing, "float32"
    yield "t5", {"num_decoder_layers": 1}, nothing, "float32"
    yield "t5", {"num_decoder_layers": None}, old(num_decoder_layers=None), "float32"
    yield "t5", {}, old(dense_act_fn="gelu_new", is_gated_act=..., feed_forward_proj="relu"), "float32"
    for family in ("t5", "mt5"):
        yield family, {}, both(dead_table, tied_twice), "float32"
    for sizes in (
        {"num_layers": 1, "num_decoder_layers": 1},
        {"relative_attention_num_buckets": 8},
        {"relative_attention_max_distance": 17},
    ):
        yield "umt5", sizes, new_head, "float32"
    yield "umt5", {}, both(new_head, old(scalable_attention=True, output_past=True)), "float32"


CASES = list(right())


def write(folder: Path, family: str, settings: dict[str, Any], edit: Edit, dtype: str) -> None:
    make_config, make_model, small = KINDS[family]
    torch.manual_seed(1)
    model = make_model(make_config(**{**small, **settings}))
    # With default initialisation (biases of 0, norm weights of 1, small logits), mistakes would not show.
    for parameter in model.parameters():
        parameter.data.normal_(0.0 if parameter.dim() > 1 else 0.5, 0.3)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    tensors = safetensors_torch.load_file(folder / "model.safetensors")
    with torch.no_grad():
        edit(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    cast = {name: t.to(getattr(torch, dtype)).contiguous() for name, t in tensors.items()}
    safetensors_torch.save_file(cast, folder / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def difference(folder: Path, family: str) -> float:
    """Return the largest error of an imported model's logits, divided by the range of transformers' logits."""
    theirs = KINDS[family][1].from_pretrained(folder, dtype=torch.float32).eval()
    found = HFModelFolder(folder)
    model: Any = (T5Model if found.config.is_t5 else GPT2Model)(found.config, parallel_output=False).eval()
    found.load(model)
    tokens = torch.randint(60, (2, 23), generator=torch.Generator().manual_seed(0))
    if found.config.is_t5:
        ours, expected = model(tokens, tokens[:, :11]), theirs(tokens, decoder_input_ids=tokens[:, :11]).logits
    else:
        ours, expected = model(tokens), theirs(tokens).logits
    assert math.isfinite(expected.abs().max())
    return float((ours - expected).abs().max() / (expected.max() - expected.min()))


@pytest.mark.slow
@pytest.mark.parametrize("number", covering(range(len(CASES)), lambda number: number % 2 == 0))
def test_it_is_right(number: int, tmp_path: Path) -> None:
    family, settings, edit, dtype = CASES[number]
    write(tmp_path, family, settings, edit, dtype)
    assert difference(tmp_path, family) <= 1e-5


@pytest.mark.parametrize("has_head", [False, True])
@pytest.mark.parametrize(
    ("keys", "scaled"),
    [
        ({"scale_decoder_outputs": False}, False),
        ({"scale_decoder_outputs": None}, False),
        ({"scale_decoder_outputs": True}, True),
        ({"scale_decoder_outputs": True, "tie_word_embeddings": False}, True),
        ({"scale_decoder_outputs": False, "tie_word_embeddings": False}, False),
        ({"tie_word_embeddings": False}, False),
        ({}, True),
    ],
)
def test_the_file_of_a_umt5_decides_whether_its_logits_are_scaled(
    keys: dict[str, Any], scaled: bool, has_head: bool, tmp_path: Path
) -> None:
    """A UMT5's logits are those of a scaled model, times d_model ** 0.5 if the file says that they are not scaled.

    transformers 5.24 reads the keys so. All releases scale the logits of a folder without the keys.
    """
    edit = new_head if has_head else nothing
    write(tmp_path, "umt5", {}, both(edit, old(scale_decoder_outputs=..., tie_word_embeddings=...)), "float32")
    theirs = KINDS["umt5"][1].from_pretrained(tmp_path, dtype=torch.float32).eval()
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    if keys.get("tie_word_embeddings") is False and not has_head:
        with pytest.raises(ValueError, match=HEAD_NAME):
            HFModelFolder(tmp_path)
        return
    found = HFModelFolder(tmp_path)
    model: Any = T5Model(found.config, parallel_output=False).eval()
    found.load(model)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        expected = theirs(tokens, decoder_input_ids=tokens).logits
        ours = model(tokens, tokens)
    torch.testing.assert_close(ours, expected * (1 if scaled else T5["d_model"] ** 0.5), rtol=1e-5, atol=1e-4)
    assert any("would scale them" in note for note in found.notes) is not scaled
    if not scaled and not hasattr(transformers.UMT5Config(), "scale_decoder_outputs"):
        with pytest.raises(ValueError, match="transformers>=5.24"):
            compare_with_hf(found.config, dict(model.named_parameters()).__getitem__, tmp_path)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_equal_matrices_are_tied_only_if_the_file_ties_them(is_tied: bool, family: str, tmp_path: Path) -> None:
    """Training would make the matrices of an untied model different, as in transformers."""

    def equal_head(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config["tie_word_embeddings"] = is_tied
        tensors["lm_head.weight"] = next(tensors[name] for name in EMBEDDINGS if name in tensors).clone()

    write(tmp_path, family, {}, equal_head, "float32")
    assert HFModelFolder(tmp_path).config.model.tie_embeddings is is_tied


@pytest.mark.parametrize("name", ["transformer.wte.weight", "transformer.h.0.mlp.c_fc.weight"])
def test_a_nan_in_a_tensor_is_imported_as_it_is(name: str, tmp_path: Path) -> None:
    def with_nan(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[name][0, 0] = math.nan

    write(tmp_path, "gpt2", {}, with_nan, "float32")
    found = HFModelFolder(tmp_path)
    assert found.config.model.tie_embeddings
    model = GPT2Model(found.config, parallel_output=False)
    found.load(model)
    assert sum(int(parameter.isnan().sum()) for parameter in model.parameters()) == 1


def test_an_exported_swiglu_of_a_t5_is_read_again() -> None:
    flags = "--family t5 --position-embedding relative --no-scale-attention --normalization rmsnorm --no-hidden-bias"
    described = t5_config(parse([*flags.split(), "--activation", "swiglu", "--vocab-size", "61"]).model, 0, 1, "fp32")
    theirs = transformers.T5Config(**described)
    assert (theirs.dense_act_fn, theirs.is_gated_act) == ("silu", True)
    settings, _ = settings_from_hf(read_config(described, Path("config.json")), True, Path("config.json"))
    assert settings["activation"] == "swiglu"


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("per_layer", ["", " --relative-attention-per-layer"], ids=["t5", "umt5"])
def test_an_exported_t5_says_whether_its_logits_are_scaled(per_layer: str, tied: bool, scaled: bool) -> None:
    shape = f"--family t5 --position-embedding relative{per_layer} --vocab-size 61"
    flags = f"{shape} --no-scale-attention --normalization rmsnorm --no-hidden-bias".split()
    flags.append("--tie-embeddings" if tied else "--no-tie-embeddings")
    flags.append("--scale-tied-logits" if scaled else "--no-scale-tied-logits")
    model = parse(flags).model
    described = t5_config(model, 0, 1, "fp32")
    assert described["scale_decoder_outputs"] is scaled
    is_ambiguous = not scaled and (tied or bool(per_layer))  # T5 of transformers 4 scale if they are tied
    assert bool(logit_scale_notes(model)) is is_ambiguous
    values = read_config(described, Path("config.json"))
    settings, _ = settings_from_hf(values, tied, Path("config.json"))
    assert settings["scale_tied_logits"] is scaled


def other_copy(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["decoder.embed_tokens.weight"] = tensors["shared.weight"] + 1


def extra(name: str) -> Edit:
    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[name] = torch.ones(3, 4)

    return edit


def gone(name: str) -> Edit:
    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return edit


REFUSED: list[tuple[str, Edit, str]] = [
    (
        "gpt2",
        old(scale_attn_by_inverse_layer_idx=True),
        "scale_attn_by_inverse_layer_idx is True; this project supports only False",
    ),
    ("gpt2", old(add_cross_attention=True), "add_cross_attention is True"),
    ("gpt2", old(activation_function="silu"), "activation_function is silu"),
    ("gpt2", old(model_type="gpt_neo"), "model_type is 'gpt_neo'"),
    ("gpt2", old(architectures=["GPT2ForSequenceClassification"]), "architectures names GPT2ForSequenceClassification"),
    ("gpt2", old(rotary_dim=4), "the key rotary_dim (4) is unknown"),
    ("gpt2", old(quantization_config={"bits": 4}), "the key quantization_config"),
    ("gpt2", old(hidden_size=32), "n_embd is 16, but its alias hidden_size is 32"),
    ("gpt2", old(n_embd=32), "but config.json implies"),
    ("gpt2", old(layer_norm_epsilon=-1.0), "config.json: --layernorm-epsilon -1.0"),
    ("gpt2", old(resid_pdrop=1.5), "config.json: --hidden-dropout 1.5"),
    ("gpt2", old(n_positions=12), "transformer.wpe.weight has shape [24, 16], but config.json implies [12, 16]"),
    ("gpt2", old(vocab_size=99), "transformer.wte.weight has shape [61, 16], but config.json implies [99, 16]"),
    ("gpt2", old(n_inner=20), "but config.json implies"),
    (
        "gpt2",
        old(n_layer=1),
        "model in config.json: transformer.h.1.",
    ),
    ("gpt2", old(n_layer=3), "no tensor transformer.h.2."),
    ("gpt2", old(tie_word_embeddings=False), "has tie_word_embeddings false, but the files contain no lm_head.weight"),
    ("gpt2", extra("score.weight"), "model in config.json: score.weight"),
    ("gpt2", gone("transformer.wte.weight"), "no tensor transformer.wte.weight"),
    ("t5", old(tie_encoder_decoder=True), "tie_encoder_decoder is True"),
    ("t5", old(is_encoder_decoder=False), "is_encoder_decoder is False, but t5 needs True"),
    ("t5", old(feed_forward_proj="silu", dense_act_fn=..., is_gated_act=...), "feed_forward_proj is silu; only gelu,"),
    ("t5", old(feed_forward_proj="gated-relu", dense_act_fn="relu", is_gated_act=True), "dense_act_fn is relu; of"),
    ("t5", old(dense_act_fn="gelu", is_gated_act=True), "dense_act_fn is gelu; of gated MLPs only those with silu,"),
    ("t5", old(architectures=["T5EncoderModel"]), "architectures names T5EncoderModel"),
    ("t5", old(d_kv=8), "but config.json implies"),
    ("t5", old(num_decoder_layers=2), "model in config.json: decoder.block.2."),
    ("t5", old(relative_attention_num_buckets=16), "relative_attention_bias.weight has shape [32, 2]"),
    ("t5", old(num_heads=3), "but config.json implies"),
    ("t5", other_copy, "decoder.embed_tokens.weight and shared.weight differ"),
    ("t5", extra("classification_head.dense.weight"), "model in config.json: classification_head.dense.weight"),
    (
        "mt5",
        old(model_type="bart"),
        "'bart'; only gpt2, t5, mt5, umt5, llama, qwen2, qwen3, mistral",
    ),
    ("umt5", extra("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"), "EncDecAttention"),
    ("umt5", gone("encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight"), "encoder.block.1.layer.0"),
    (
        "t5",
        old(model_type="umt5", architectures=None),
        "no tensor encoder.block.1.layer.0.SelfAttention.relative_attention_bias",
    ),
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
    assert len(CASES) + len(REFUSED) >= 130


@pytest.mark.parametrize(
    "flags",
    [
        "--activation swiglu",
        "--activation gated-gelu",
        "--position-embedding rope",
        "--num-key-value-heads 1",
        "--qk-norm",
        "--sliding-window 8",
        "--no-qkv-bias",
        "--no-hidden-bias",
        "--normalization rmsnorm",
    ],
)
def test_what_a_gpt2_of_theirs_cannot_be(flags: str) -> None:
    with pytest.raises(ConfigError, match=f"GPT-2 does not support {flags}$"):
        gpt2_config(parse(flags.split()).model, 8, 0, 0, "fp32")


@pytest.mark.parametrize(("positions", "seq_length"), [(4096, 4096), (8192, 4096)])
def test_a_gpt2_with_many_positions_trains_on_with_samples_of_4096_tokens(positions: int, seq_length: int) -> None:
    where = Path("config.json")
    values = read_config({"model_type": "gpt2", "n_positions": positions}, where)
    settings, notes = settings_from_hf(values, True, where)
    assert (settings["seq_length"], settings["max_position_embeddings"]) == (seq_length, positions)
    assert len(notes) == int(positions > seq_length)
