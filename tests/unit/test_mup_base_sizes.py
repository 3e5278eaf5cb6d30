"""muP where parts of the model do not grow with its width: each matrix follows its own inputs and outputs."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.config import Config
from megatron.config.command_line import parse, with_values
from megatron.config.fields import ConfigError
from megatron.model import global_parameters
from megatron.model.block import TransformerLayer
from megatron.model.gpt2 import GPT2Model
from megatron.model.layer_stack import LayerStack
from megatron.model.lr_factors import layer_lr_factors
from megatron.model.muon_parameters import muon_parameters
from megatron.model.t5 import T5Model
from megatron.optim.muon import _lr_ratios
from megatron_tools.report.coordinate_check import activation_changes, growth_exponent
from tests.support import covering

SIZES = "--num-layers 2 --num-attention-heads 4 --vocab-size 61 --seq-length 16 --attention-dropout 0"
LLAMA = "--family llama --position-embedding rope --normalization rmsnorm --activation swiglu --no-hidden-bias"
T5 = (
    "--family t5 --position-embedding relative --normalization rmsnorm --activation gated-gelu --no-hidden-bias "
    "--enc-seq-length 16"
)
EXPERTS = f"{LLAMA} --num-experts 4 --moe-layer-frequency 0 1 --num-shared-experts 1"
BASE = 32  # width of the base models
# Family -> flags, (flags of the base model, flags of a model of another width, muP's flags for it)
FAMILIES = {
    "gpt2": ("", ("--ff-hidden-size 128", "--ff-hidden-size 128", "--mup-base-ff-hidden-size 128")),
    "llama": (
        LLAMA,
        (
            "--ff-hidden-size 96 --num-key-value-heads 1",
            "--ff-hidden-size 144 --num-key-value-heads 1",
            "--mup-base-ff-hidden-size 96 --mup-base-num-key-value-heads 1",
        ),
    ),
    "t5": (T5, ("--ff-hidden-size 80", "--ff-hidden-size 80", "--mup-base-ff-hidden-size 80")),
    "experts": (
        EXPERTS,
        (
            "--ff-hidden-size 128 --expert-ff-hidden-size 40",
            "--ff-hidden-size 192 --expert-ff-hidden-size 40",
            "--mup-base-ff-hidden-size 128 --mup-base-expert-ff-hidden-size 40",
        ),
    ),
}  # fmt: skip


def _flags(name: str, width: int) -> str:
    """Return the flags of a model whose heads have one width, with muP's if it is wider than the base model."""
    family, (base, wide, mup) = FAMILIES[name]
    rest = base if width == BASE else f"{wide} --mup-base-hidden-size {BASE} {mup}"
    heads = f"--hidden-size {width} --num-attention-heads {width // 8} --kv-hidden-size 8"
    return f"{SIZES} {heads} {family} {rest}"


def _model(flags: str) -> tuple[Config, LayerStack]:
    config = parse(flags.split())
    return config, (T5Model if config.is_t5 else GPT2Model)(config, parallel_output=False)


def _matrices(model: LayerStack) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the matrices of the linear layers of attention and MLP, by name."""
    for name, p in global_parameters(model):
        if p in muon_parameters(model):
            yield name, p


def _torchs_ratio(shape: tuple[int, ...], adjust: str) -> float:
    """Return torch.optim.Muon's factor of the learning rate."""
    return torch.optim._muon._adjust_lr(1.0, adjust, torch.Size(shape))


def _parts(t: Tensor, fused: mpu.FusedRows | None) -> list[Tensor]:
    return [t] if fused is None else [part.reshape(-1, t.shape[1]) for part in fused.split(t)]


@pytest.mark.parametrize("name", FAMILIES)
def test_adam_and_initial_values_follow_the_inputs_of_each_matrix(name: str) -> None:
    """Yang et al. 2022: the rate is divided by the growth of the inputs, the deviation by its square root."""
    _, base = _model(_flags(name, BASE))
    config, wide = _model(_flags(name, 3 * BASE))
    factors = layer_lr_factors(wide, config.model)
    of_base = dict(_matrices(base))
    for key, p in _matrices(wide):
        inputs = p.shape[1] / of_base[key].shape[1]
        assert factors[p] == pytest.approx(1 / inputs), key
        std = of_base[key].std().item() / math.sqrt(inputs)
        assert p.std().item() == pytest.approx(std, rel=0.1), key


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_follows_inputs_and_outputs_of_each_matrix(name: str, adjust: str) -> None:
    """Yang et al. 2023: singular values of updates grow as sqrt(outputs / inputs), also in fused matrices."""
    _, base = _model(_flags(name, BASE))
    config, wide = _model(_flags(name, 3 * BASE))
    factors = layer_lr_factors(wide, config.model, adjust)
    of_base = dict(_matrices(base))
    for key, p in _matrices(wide):
        spec = mpu.spec_of(p)
        rates = torch.as_tensor(factors[p] * _lr_ratios(spec, adjust)).expand(p.shape)
        of_wide = _parts(p.detach(), spec.fused)
        of_narrow = _parts(of_base[key].detach(), mpu.spec_of(of_base[key]).fused)
        for rate, after, before in zip(_parts(rates.contiguous(), spec.fused), of_wide, of_narrow, strict=True):
            outputs, inputs = (a / b for a, b in zip(after.shape, before.shape, strict=True))
            expected = _torchs_ratio(tuple(before.shape), adjust) * math.sqrt(outputs / inputs)
            torch.testing.assert_close(rate, torch.full_like(rate, expected), rtol=1e-6, atol=0, msg=key)


# Family, optimizer, and what has a fixed size.
FIXED = [
    *((name, optimizer, "ff_hidden_size") for name in ("gpt2", "llama", "t5") for optimizer in ("adam", "muon")),
    *(("experts", optimizer, "ff_hidden_size expert_ff_hidden_size") for optimizer in ("adam", "muon")),
]


@pytest.mark.parametrize(("name", "optimizer", "fixed"), covering(FIXED, FIXED[::3].__contains__, several=True))
def test_activations_have_one_size_in_every_width(name: str, optimizer: str, fixed: str) -> None:
    """Without the base size, rates are wrong by a power of the width."""
    rate = "0.001" if optimizer == "adam" else "0.01"
    widths = (32, 64, 128, 256)
    found = []
    wrong = []
    for width in widths:
        config = parse(f"{_flags(name, width)} --optimizer {optimizer} --lr {rate}".split())
        found.append(activation_changes(config, 4))
        unknown = {f"mup_base_{size}": None for size in fixed.split()}
        wrong.append(activation_changes(with_values(config, unknown), 4)["MLP"])
    for each in ("attention", "MLP", "residual stream", "final norm"):
        assert abs(growth_exponent(widths, [sizes[each] for sizes in found])) < 0.2, each
    assert abs(growth_exponent(widths, wrong)) > 0.25


@pytest.mark.parametrize("size", ["ff_hidden_size", "num_key_value_heads", "expert_ff_hidden_size"])
def test_base_sizes_need_the_base_width(size: str) -> None:
    with pytest.raises(ConfigError, match="needs --mup-base-hidden-size"):
        parse(f"{SIZES} {EXPERTS} --hidden-size 32 --mup-base-{size.replace('_', '-')} 8".split())


def test_a_given_base_size_is_not_taken_for_granted() -> None:
    notes = list[str]()
    parse(f"{_flags('llama', 64)} --optimizer muon".split(), notify=notes.append)
    (note,) = [note for note in notes if "--mup-base-kv-hidden-size" in note]
    assert note.partition(" has ")[2].partition(":")[0] == "--num-attention-heads 4 of width 8"


DEEP = f"{SIZES} {T5} --hidden-size {BASE}"


def _deep(encoder: int, decoder: int, mup: str) -> tuple[Config, LayerStack]:
    return _model(f"{DEEP} --num-layers {encoder} --num-decoder-layers {decoder} --mup-base-hidden-size {BASE} {mup}")


@pytest.mark.parametrize("decoder", [2, 8])
def test_each_stack_of_a_t5_has_the_factor_of_its_own_depth(decoder: int) -> None:
    """Yang et al. 2023: branches and rates are multiplied by sqrt(base / layers); initial values keep their size."""
    _, base = _deep(3, 2, "")
    config, model = _deep(6, decoder, "--mup-base-num-layers 3 --mup-base-num-decoder-layers 2")
    expected = {"encoder": math.sqrt(3 / 6), "decoder": math.sqrt(2 / decoder)}
    factors = layer_lr_factors(model, config.model)
    of_base = dict(global_parameters(base))
    for key, p in global_parameters(model):
        if ".layers." in key:
            stack, _, number, rest = key.split(".", 3)
            assert factors[p] == pytest.approx(expected[stack]), key
            if p.dim() > 1:
                std = of_base[f"{stack}.layers.{int(number) % 2}.{rest}"].std().item()
                assert p.std().item() == pytest.approx(std, rel=0.1), key
    for module in model.modules():
        if isinstance(module, TransformerLayer):
            assert module.branch_factor == pytest.approx(expected["decoder" if module.stack_index else "encoder"])


def test_activations_have_one_size_in_every_depth_of_the_decoder() -> None:
    """Without the base's decoder layers, the residual stream of a deeper decoder grows."""
    depths = (2, 4, 8, 16)
    found = []
    wrong = []
    for depth in depths:
        layers = f"--num-layers 2 --num-decoder-layers {depth} --mup-base-num-layers 2"
        config = parse(f"{DEEP} {layers} --mup-base-hidden-size {BASE} --lr 0.003".split())
        wrong.append(activation_changes(config, 4)["residual stream"])
        config = with_values(config, {"mup_base_num_decoder_layers": 2})
        found.append(activation_changes(config, 4)["residual stream"])
    assert abs(growth_exponent(depths, found)) < 0.2
    assert growth_exponent(depths, wrong) > 0.6
