"""muP: initial weights and learning rates follow Yang et al. 2022, and exports have the logits of our model."""

import json
import math
from pathlib import Path

import pytest
import torch

from megatron.config import Config
from megatron.config.command_line import parse, with_values
from megatron.config.fields import ConfigError
from megatron.model import global_parameters
from megatron.model.gpt2 import GPT2Model
from megatron.model.layer_stack import LayerStack
from megatron.model.lr_factors import layer_lr_factors
from megatron.model.t5 import T5Model
from megatron.optim import build_optimizer, group_keys
from megatron_tools.convert.hf_compare import compare_with_hf
from megatron_tools.convert.hf_config import gpt2_config, t5_config
from megatron_tools.convert.hf_folder import export_entries, write_tensors
from megatron_tools.convert.hf_llama import llama_config
from megatron_tools.convert.hf_names import parameter_matches
from megatron_tools.report.coordinate_check import activation_changes, config_of_width, growth_exponent, measure_widths
from tests.support import covering

SIZES = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 61 --seq-length 16 --attention-dropout 0"
MUP = "--mup-base-hidden-size 12 --mup-base-kv-hidden-size 3 --mup-base-num-layers 1"
LLAMA = "--family llama --position-embedding rope --normalization rmsnorm --activation swiglu --no-hidden-bias"
T5 = (
    "--family t5 --position-embedding relative --normalization rmsnorm --activation gated-gelu --no-hidden-bias "
    "--num-decoder-layers 3 --enc-seq-length 16"
)
MODELS = {
    "gpt2": "",
    "gpt2-untied": "--no-tie-embeddings --no-scale-attention",
    "llama": f"{LLAMA} --num-key-value-heads 2",
    "qwen2": f"{LLAMA} --num-key-value-heads 2 --qkv-bias --no-tie-embeddings",
    "qwen3": f"{LLAMA} --num-key-value-heads 2 --qk-norm",
    "t5": f"{T5} --no-scale-attention --scale-tied-logits",
    "t5-untied": f"{T5} --no-tie-embeddings",
    "t5-deep-decoder": f"{T5} --mup-base-num-decoder-layers 1",
    "umt5": f"{T5} --no-scale-attention --scale-tied-logits --relative-attention-per-layer",
}


def _model(flags: str, mup: str = MUP) -> tuple[Config, LayerStack]:
    config = parse(f"{SIZES} {flags} {mup}".split())
    model = (T5Model if config.is_t5 else GPT2Model)(config, parallel_output=False).eval()
    return config, model


@pytest.mark.parametrize("name", MODELS)
def test_exports_have_equal_logits(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config, model = _model(MODELS[name])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(float(parameter.dim() == 1), 0.15)
    ours = {key: p.detach() for key, p in global_parameters(model)}
    m, positions = config.model, config.positions
    whole = {key: value[: m.vocab_size] if "word_embeddings" in key else value for key, value in ours.items()}
    entries = export_entries(parameter_matches(m), whole.__getitem__, lambda key: list(whole[key].shape), "fp32")
    write_tensors(tmp_path, entries, 10**9)
    if config.is_t5:
        described = t5_config(m, 0, 1, "fp32")
    elif m.family == "llama":
        described = llama_config(m, positions, 1, 2, "fp32")
    else:
        described = gpt2_config(m, positions, 0, 1, "fp32")
    (tmp_path / "config.json").write_text(json.dumps(described))
    compare_with_hf(config, whole.__getitem__, tmp_path)  # raises an error if the logits differ by more than 1e-5


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5-untied"])
def test_initial_weights_and_learning_rates(name: str) -> None:
    flags = f"{MODELS[name]} --hidden-size 256 --vocab-size 300 --weight-decay 0.1"
    config, model = _model(flags, "--mup-base-hidden-size 64")
    factors = layer_lr_factors(model, config.model)
    groups = build_optimizer(group_keys(model, config.optim, factors=factors), config.optim).param_groups
    rates = {p: (group["lr_factor"], group["weight_decay"]) for group in groups for p in group["params"]}
    for key, p in global_parameters(model):
        hidden = ".attention." in key or ".cross_attention." in key or ".mlp." in key
        if p.dim() == 1:
            assert rates[p] == (1.0, 0.0), key
        elif not hidden:
            assert rates[p] == (1.0, 0.1), key
            assert p[:300].std().item() == pytest.approx(0.02, rel=0.15), key
        else:
            assert rates[p] == (0.25, pytest.approx(0.4)), key
            branches = {"encoder": 4, "decoder": 9}.get(key.split(".")[0], 4)
            std = 0.02 / 2 / (math.sqrt(branches) if ".dense." in key or "dense_4h_to_h" in key else 1.0)
            assert p.std().item() == pytest.approx(std, rel=0.1), key


@pytest.mark.parametrize("name", ["gpt2-untied", "llama", "t5"])
def test_the_base_model_is_unchanged(name: str) -> None:
    """A model of the base sizes is the model without muP, to the last bit."""
    base = "--mup-base-hidden-size 32 --mup-base-num-layers 2 --mup-base-kv-hidden-size 8"
    (config, model), (_, plain) = _model(MODELS[name], base), _model(MODELS[name], "")
    tokens = torch.arange(16).view(1, 16)
    inputs = (tokens, tokens) if config.is_t5 else (tokens,)
    assert torch.equal(model(*inputs), plain(*inputs))
    assert set(layer_lr_factors(model, config.model).values()) == {1.0}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--mup-base-num-layers 2", "--mup-base-hidden-size"),
        ("--mup-base-kv-hidden-size 2", "--mup-base-hidden-size"),
        ("--mup-base-hidden-size 8 --optimizer sgd", "--optimizer"),
    ],
)
def test_incomplete_settings_are_refused(flags: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(f"{SIZES} {flags}".split())


def test_the_model_without_mup_has_none_of_its_settings() -> None:
    base = parse(f"{SIZES} --mup-base-hidden-size 8 --mup-base-num-layers 1".split())
    model = config_of_width(2 * base.model.hidden_size, base, "heads", mup=False).model
    assert model.width_factor == model.branch_factor == 1


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("", {"--num-attention-heads 1 of width 8", "--ff-hidden-size 32"}),
        ("--mup-base-kv-hidden-size 4", {"--num-attention-heads 2 of width 4", "--ff-hidden-size 32"}),
        ("--ff-hidden-size 100", {"--num-attention-heads 1 of width 8", "--ff-hidden-size 25"}),
        (
            f"{LLAMA} --num-key-value-heads 2 --optimizer muon",
            {"--num-attention-heads 1 of width 8", "--num-key-value-heads 0.5", "--ff-hidden-size 32"},
        ),
        (
            f"{LLAMA} --num-experts 4 --expert-ff-hidden-size 24",
            {"--num-attention-heads 1 of width 8", "--ff-hidden-size 32", "--expert-ff-hidden-size 6"},
        ),
        (
            f"{T5} --mup-base-num-layers 1",
            {"--num-attention-heads 1 of width 8", "--ff-hidden-size 32", "--num-decoder-layers 1.5"},
        ),
    ],
)
def test_a_note_lists_the_sizes_of_the_base_model(flags: str, named: set[str]) -> None:
    notes = list[str]()
    parse(f"{SIZES} {flags} --mup-base-hidden-size 8".split(), notify=notes.append)
    (note,) = [note for note in notes if "--mup-base-kv-hidden-size" in note]
    assert set(note.partition(" has ")[2].partition(":")[0].split(", ")) == named


def test_the_base_model_gets_no_note() -> None:
    notes = list[str]()
    parse(f"{SIZES} --mup-base-hidden-size 32".split(), notify=notes.append)
    assert notes == []


# Model -> its flags, for checks at four widths.
FAMILIES = {
    "gpt2": MODELS["gpt2"],
    "llama": MODELS["llama"],
    "t5": MODELS["t5"],
    "experts": f"{LLAMA} --num-experts 4 --num-shared-experts 1 --shared-expert-gate --expert-ff-hidden-size 48",
}
EVERY = [(name, optimizer) for name in FAMILIES for optimizer in ("adam", "muon")]


@pytest.mark.parametrize(("name", "optimizer"), covering(EVERY, [("experts", "adam")].__contains__, several=True))
def test_activations_of_every_family_have_one_size_with_both_optimizers(name: str, optimizer: str) -> None:
    widths = (16, 32, 64) if (name, optimizer) == ("experts", "adam") else (32, 64, 128, 256)
    rate = "0.001" if optimizer == "adam" else "0.01"
    flags = f"{SIZES} {FAMILIES[name]} --hidden-size {widths[0]} --vocab-size 256 --optimizer {optimizer} --lr {rate}"
    found = measure_widths(parse(flags.split()), widths, "heads", steps=4, seeds=1)
    for kind in ("attention", "MLP", "residual stream", "final norm"):
        exponents = {
            mup: growth_exponent(widths, [sizes[kind] for sizes in of_width]) for mup, of_width in found.items()
        }
        assert abs(exponents[True]) < 0.2, kind
        assert exponents[False] > (0.6 if kind in ("attention", "MLP") else exponents[True]), kind


@pytest.mark.full
@pytest.mark.parametrize(("optimizer", "rate"), [("adam", "0.001"), ("muon", "0.01")])
def test_a_fixed_number_of_key_value_heads_fits_muon_if_it_is_given(optimizer: str, rate: str) -> None:
    widths = (64, 128, 256, 512)
    flags = f"{SIZES} {LLAMA} --hidden-size 64 --num-attention-heads 8 --num-key-value-heads 1 --vocab-size 256"
    base = parse(f"{flags} --seq-length 32 --optimizer {optimizer} --lr {rate}".split())

    def exponent(heads: int | None) -> float:
        fixed = {"num_key_value_heads": 1, "mup_base_num_key_value_heads": heads}
        changes = []
        for width in widths:
            config = with_values(config_of_width(width, base, "heads", True), fixed)
            changes.append(
                sum(activation_changes(with_values(config, {"seed": seed}), 4)["attention"] for seed in (1, 2))
            )
        return growth_exponent(widths, changes)

    assert abs(exponent(heads=1)) < 0.15
    if optimizer == "muon":
        assert exponent(heads=None) > 0.25


GROWING = [("gpt2", "heads"), ("llama", "heads"), ("t5", "head-size")]


@pytest.mark.parametrize(("name", "grow"), covering(GROWING, GROWING[:1].__contains__, several=True))
def test_activations_have_one_size_in_every_width(name: str, grow: str) -> None:
    """With muP, activations of trained models have one size in every width; without muP, they grow with the width."""
    widths = (64, 128, 256)
    flags = f"{MODELS[name]} --num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 256 --seq-length 32"
    found = measure_widths(parse([*flags.split(), "--lr", "0.001"]), widths, grow, steps=4, seeds=2)
    exponents = {
        (mup, kind): growth_exponent(widths, [sizes[kind] for sizes in of_width])
        for mup, of_width in found.items()
        for kind in of_width[0]
    }
    for kind in ("embedding", "attention", "MLP", "residual stream", "final norm", "logits"):
        # The first logits of a wide model are small, so its logits change slightly less.
        assert abs(exponents[True, kind]) < (0.45 if kind == "logits" else 0.2), kind
    assert min(exponents[False, kind] for kind in ("attention", "MLP", "residual stream")) > 0.7


@pytest.mark.parametrize("scale", covering(["match_rms_adamw", "original"], ["match_rms_adamw"].__contains__))
def test_activations_have_one_size_with_muon(scale: str) -> None:
    """Muon's matrices get factors of their own, as its updates grow less with the width than those of Adam."""
    widths = (32, 64, 128)
    flags = f"{SIZES} --vocab-size 256 --optimizer muon --muon-adjust-lr-fn {scale} --lr 0.01"
    found = measure_widths(parse(flags.split()), widths, "heads", steps=4, seeds=1)
    exponents = {mup: growth_exponent(widths, [sizes["MLP"] for sizes in of_width]) for mup, of_width in found.items()}
    assert abs(exponents[True]) < 0.15 and exponents[False] > 0.4


def test_changes_of_zero_have_no_exponent() -> None:
    assert math.isnan(growth_exponent([16, 32], [0.0, 0.0]))
