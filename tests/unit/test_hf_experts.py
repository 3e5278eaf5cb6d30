"""Mixtral, Qwen2-MoE and Qwen3-MoE are imported, trained and exported as transformers' classes; others are refused."""

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.command_line import parse
from megatron.config.fields import ConfigError
from megatron.features.sampling import Sampling
from megatron.model import GPT2Model
from megatron.model.router import Router, update_routers
from megatron_tools.convert.hf_config import gpt2_config, t5_config
from megatron_tools.convert.hf_folder import HFModelFolder, export_entries, write_tensors
from megatron_tools.convert.hf_llama import llama_config
from megatron_tools.convert.hf_names import parameter_matches
from megatron_tools.write.generation import GPT2Stepper, sample
from tests.llama_twins import exact
from tests.support import covering
from tests.unit.test_hf_configs import KINDS, Edit, gone, nothing, old, write

transformers = pytest.importorskip("transformers")
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")


def by_chance(dice: random.Random, family: str) -> dict[str, Any]:
    """Return random settings: sizes, heads, experts, shared experts, layers without experts, windows, biases."""
    heads, layers, experts = dice.choice((1, 2, 4, 6)), dice.randint(1, 4), dice.randint(1, 9)
    width = dice.randint(1, 24)
    settings: dict[str, Any] = {
        "hidden_size": heads * dice.choice((4, 6, 8)),
        "num_attention_heads": heads,
        "num_key_value_heads": dice.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "head_dim": 2 * dice.randint(1, 8),
        "intermediate_size": dice.randint(1, 40),
        "num_hidden_layers": layers,
        "vocab_size": dice.randint(61, 200),
        "tie_word_embeddings": dice.random() < 0.5,
        "hidden_act": dice.choice(("silu", "silu", "gelu_pytorch_tanh")),
        "rms_norm_eps": dice.choice((1e-6, 1e-5, 1e-3)),
        "num_experts_per_tok": dice.randint(1, experts),
        "rope_parameters": {"rope_type": "default", "rope_theta": dice.choice((100.0, 1e4, 1e6))},
    }
    if family == "mixtral":
        return {**settings, "num_local_experts": experts, "sliding_window": dice.choice((None, 5))}
    settings |= {
        "num_experts": experts,
        "moe_intermediate_size": width,
        "norm_topk_prob": dice.random() < 0.5,
        "decoder_sparse_step": dice.choice((1, 1, 2)) if layers > 1 else 1,
        "mlp_only_layers": [i for i in range(layers) if i != 1 and dice.random() < 0.2] if layers > 1 else [],
    }
    if family == "qwen2_moe":
        settings |= {"shared_expert_intermediate_size": width * dice.randint(1, 4), "qkv_bias": dice.random() < 0.7}
        if dice.random() < 0.4:
            settings |= {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention"] * layers}
    elif dice.random() < 0.4:
        settings |= {"use_sliding_window": True, "sliding_window": 5}
    return settings


CASES = [(FAMILIES[seed % 3], by_chance(random.Random(seed), FAMILIES[seed % 3])) for seed in range(42)]


def fuse(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Store the experts as transformers 5 holds them in memory, in one tensor for all gates and ups and one for downs.

    Written from the description of these tensors, independently of transformers' conversion.
    """
    found: dict[str, dict[int, Tensor]] = {}
    for name in list(tensors):
        tensor = tensors.pop(name)
        new = name.replace(".block_sparse_moe.", ".mlp.")
        for a, b in ((".w1.", ".gate_proj."), (".w3.", ".up_proj."), (".w2.", ".down_proj.")):
            new = new.replace(a, b)
        part = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", new)
        if part:
            found.setdefault(f"{part[1]}.{part[3]}", {})[int(part[2])] = tensor
        else:
            tensors[new] = tensor
    stacked = {name: torch.stack([parts[i] for i in sorted(parts)]) for name, parts in found.items()}
    for name, tensor in stacked.items():
        if name.endswith("gate_proj"):
            up = stacked[name.replace("gate_proj", "up_proj")]
            tensors[name.replace("gate_proj", "gate_up_proj")] = torch.cat([tensor, up], 1)
        elif name.endswith("down_proj"):
            tensors[name] = tensor


def export(folder: Path, output: Path, config: Any, weights: dict[str, Tensor]) -> None:
    """Write weights in this project's names as a Hugging Face folder."""
    output.mkdir()
    m = config.model
    entries = export_entries(parameter_matches(m), weights.__getitem__, lambda name: weights[name].shape, "fp32")
    write_tensors(output, entries, 10**9)
    described = llama_config(m, config.positions, 1, 2, "fp32")
    (output / "config.json").write_text(json.dumps(described))


def load_theirs(folder: Path, family: str) -> Any:
    return exact(KINDS[family][1].from_pretrained(folder, dtype=torch.float32, experts_implementation="eager"))


def load_ours(folder: Path) -> tuple[Any, Any]:
    theirs = HFModelFolder(folder)
    model: Any = GPT2Model(theirs.config, parallel_output=False)
    theirs.load(model)
    return theirs, model.double()


def train(model: Any, logits_of: Any, tokens: Tensor) -> tuple[list[float], Tensor]:
    """Train for three steps with AdamW. Return their losses, and the logits afterwards."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-6, weight_decay=0.1)
    losses = []
    model.train()
    for step in range(3):
        text = tokens[step]
        loss = F.cross_entropy(logits_of(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        return losses, logits_of(tokens[0])


# Together, these cases have every setting that is drawn: shared experts, layers without experts, windows, fused files.
FEW = {1, 3, 5, 6, 7, 8, 10, 11}


@pytest.mark.slow
@pytest.mark.parametrize("number", covering(list(range(len(CASES))), FEW.__contains__))
def test_logits_and_three_steps_are_theirs(number: int, tmp_path: Path) -> None:
    """Logits equal transformers' to 1e-5, losses and logits of three AdamW steps to 2e-5, and exports bit for bit."""
    family, settings = CASES[number]
    write(tmp_path / "in", family, settings, fuse if number % 2 else nothing, "float32")
    folder, ours = load_ours(tmp_path / "in")
    weights = {
        match.our_name: match.join([folder.tensors.read(name) for name in match.their_names])
        for match in folder.matches
    }
    export(tmp_path / "in", tmp_path / "out", folder.config, weights)
    theirs, back = (load_theirs(tmp_path / each, family) for each in ("in", "out"))
    wanted, found = theirs.state_dict(), back.state_dict()
    assert wanted.keys() == found.keys() and all(torch.equal(wanted[name], found[name]) for name in wanted)
    tokens = torch.randint(60, (3, 4, 23), generator=torch.Generator().manual_seed(number))
    with torch.no_grad():
        expected = theirs.eval()(tokens[0]).logits
        spread = float(expected.max() - expected.min())
        assert float((ours.eval()(tokens[0]) - expected).abs().max()) <= 1e-5 * spread
        assert torch.equal(back.eval()(tokens[0]).logits, expected)
    ours_losses, ours_logits = train(ours, ours, tokens)
    their_losses, their_logits = train(theirs, lambda x: theirs(x).logits, tokens)
    assert ours_losses == pytest.approx(their_losses, rel=2e-5)
    assert max(their_losses) - min(their_losses) > 1e-2 and not torch.equal(their_logits, expected)
    spread = float(their_logits.max() - their_logits.min())
    assert float((ours_logits - their_logits).abs().max()) <= 2e-5 * spread


def test_the_cases_cover_what_they_name() -> None:
    for family in FAMILIES:
        drawn = [settings for kind, settings in CASES if kind == family]
        assert len(drawn) >= 13
        assert len({each["num_experts_per_tok"] for each in drawn}) >= 4
        for key in ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "tie_word_embeddings", "hidden_act"):
            assert key not in drawn[0] or len({str(each[key]) for each in drawn}) >= 2, (family, key)


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_with_caches_is_theirs(family: str, tmp_path: Path) -> None:
    """With key-value caches, logits after random tokens and greedily generated tokens are transformers'."""
    window = {"qwen2_moe": {"qkv_bias": True}, "qwen3_moe": {"use_sliding_window": True, "sliding_window": 5}}
    write(tmp_path, family, {"max_position_embeddings": 64, **window.get(family, {})}, nothing, "float32")
    theirs, (folder, ours) = load_theirs(tmp_path, family).eval(), load_ours(tmp_path)
    for seed in range(2):
        prompt = torch.randint(60, (1, 5 + seed), generator=torch.Generator().manual_seed(seed))
        stepper = GPT2Stepper(ours.eval(), prompt[0].tolist(), folder.config.positions)
        (found,) = sample(stepper, 1, 30, -1, Sampling(temperature=0), 0)
        wanted = theirs.generate(prompt, max_new_tokens=30, min_new_tokens=30, do_sample=False, use_cache=True)
        assert found == wanted[0, prompt.shape[1] :].tolist()
        text = torch.randint(60, (1, 30), generator=torch.Generator().manual_seed(seed + 9))
        with torch.no_grad():
            logits = [stepper.first(1), *(stepper.next(text[:, i]) for i in range(30))]
            expected = theirs(torch.cat([prompt, text], 1)).logits[0, prompt.shape[1] - 1 :]
        assert float((torch.cat(logits) - expected).abs().max()) <= 1e-5 * float(expected.max() - expected.min())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_of_the_router_is_theirs_for_equal_shares(family: str, tmp_path: Path) -> None:
    """With one layer and the shares of the same batch, the auxiliary loss and its gradient are transformers'."""
    settings = {"num_hidden_layers": 1, "router_aux_loss_coef": 0.3, "output_router_logits": True}
    write(tmp_path, family, settings, nothing, "float32")
    theirs, (_, ours) = load_theirs(tmp_path, family), load_ours(tmp_path)
    tokens = torch.randint(60, (3, 17), generator=torch.Generator().manual_seed(3))
    result = theirs(tokens)
    expected = 0.3 * result.aux_loss
    (router,) = (module for module in ours.modules() if isinstance(module, Router))
    losses: list[Tensor] = []
    router.register_forward_hook(lambda module, args, result: losses.append(result.loss))
    ours.train()
    ours(tokens)
    update_routers(ours)
    ours(tokens)
    found = losses[1]
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    (grad,) = torch.autograd.grad(found, router.weight)
    (wanted,) = torch.autograd.grad(expected, theirs.model.layers[0].mlp.gate.weight)
    assert float((grad - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


def test_the_loss_of_the_router_comes_back(tmp_path: Path) -> None:
    """Several layers share the factor; its export has the coefficient of the import, with a note if it was unused."""
    write(tmp_path, "qwen3_moe", {"num_hidden_layers": 4, "mlp_only_layers": [2]}, nothing, "float32")
    theirs = HFModelFolder(tmp_path)
    assert theirs.config.model.router_aux_loss == pytest.approx(0.001 * 2 / 3)
    assert llama_config(theirs.config.model, 24, 1, 2, "fp32")["router_aux_loss_coef"] == pytest.approx(0.001)
    assert any("--router-aux-loss 0 disables it" in note for note in theirs.notes)


def one_more(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    fuse(config, tensors)
    for name in list(tensors):
        if ".experts." in name:
            tensors[name] = torch.cat([tensors[name], tensors[name][:1]])


def odd(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    fuse(config, tensors)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors[name] = tensors[name][:, 1:]


def flat(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    fuse(config, tensors)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors[name] = tensors[name].flatten(0, 1)


NEIGHBOURS = {
    "deepseek_v2", "deepseek_v3", "gpt_oss", "olmoe", "phimoe", "dbrx", "qwen3_next", "llama4", "llama4_text",
    "granitemoe", "glm4_moe", "ernie4_5_moe", "minimax", "jamba", "jetmoe", "hunyuan_v1_moe", "dots1", "flex_olmo",
    "qwen3_vl_moe", "qwen3_omni_moe", "qwen3_5_moe", "switch_transformers",
}  # fmt: skip
REFUSED: list[tuple[str, Edit, str]] = [
    *[("qwen3_moe", old(model_type=each, architectures=[]), f"model_type is '{each}'") for each in sorted(NEIGHBOURS)],
    ("mixtral", old(architectures=["MixtralForTokenClassification"]), "architectures names MixtralForTokenClassif"),
    ("mixtral", old(router_jitter_noise=0.1), "router_jitter_noise is 0.1; transformers also multiplies the input"),
    ("mixtral", old(num_local_experts=4), "block_sparse_moe.gate.weight has shape [5, 32], but config.json implies [4"),
    ("mixtral", old(num_local_experts=6), "block_sparse_moe.gate.weight has shape [5, 32], but config.json implies [6"),
    ("mixtral", old(num_local_experts=0), "--num-experts 0 must be at least 1"),
    ("mixtral", old(num_local_experts=10**9), "num_local_experts is 1000000000, but the largest dimension"),
    ("mixtral", old(num_experts=3), "num_local_experts is 5, but its alias num_experts is 3"),
    ("mixtral", old(num_experts_per_tok=6), "--experts-per-token 6 is more than --num-experts 5"),
    ("mixtral", old(num_experts_per_tok=0), "--experts-per-token 0"),
    ("mixtral", old(intermediate_size=21), "but config.json implies"),
    ("mixtral", old(router_aux_loss_coef=-1.0), "--router-aux-loss -1.0 must be at least 0"),
    ("mixtral", old(router_aux_loss_coef="x"), "router_aux_loss_coef is 'x', not of type float"),
    ("mixtral", old(norm_topk_prob=True), "the key norm_topk_prob (True) is unknown"),
    ("mixtral", old(shared_expert_intermediate_size=8), "the key shared_expert_intermediate_size (8) is unknown"),
    ("mixtral", old(attention_bias=True), "the key attention_bias (True) is unknown"),
    ("mixtral", gone("model.layers.1.block_sparse_moe.experts.2.w3.weight"), "no tensor model.layers.1.block_sparse"),
    ("mixtral", one_more, "model in config.json: model.layers.0.mlp.experts.5.down_proj.weight"),
    ("mixtral", odd, "experts.0.w1.weight has shape [19, 32], but config.json implies [20, 32]"),
    ("mixtral", flat, "no tensor model.layers.0.block_sparse_moe.experts.0.w1.weight"),
    ("qwen2_moe", old(shared_expert_intermediate_size=25), "must be a multiple of moe_intermediate_size 12"),
    ("qwen2_moe", old(shared_expert_intermediate_size=0), "shared_expert_intermediate_size is 0"),
    ("qwen2_moe", old(moe_intermediate_size=0), "must be a multiple of moe_intermediate_size 0"),
    ("qwen2_moe", old(decoder_sparse_step=0), "decoder_sparse_step is 0; it must be at least 1"),
    ("qwen2_moe", old(decoder_sparse_step=2), "no tensor model.layers.0.mlp.gate_proj.weight"),
    ("qwen2_moe", old(mlp_only_layers=[0]), "no tensor model.layers.0.mlp.gate_proj.weight"),
    ("qwen2_moe", old(mlp_only_layers=[0, 1]), "decoder_sparse_step 1 and mlp_only_layers [0, 1] leave no layer with"),
    ("qwen2_moe", old(decoder_sparse_step=3), "decoder_sparse_step 3 and mlp_only_layers [] leave no layer with"),
    ("qwen2_moe", old(mlp_only_layers=3), "mlp_only_layers is 3, not of type list"),
    ("qwen2_moe", old(qkv_bias=False), "model in config.json: model.layers.0.self_attn.k_proj.bias"),
    ("qwen2_moe", old(use_sliding_window=True, layer_types=...), "must give all 2 layers the same attention"),
    ("qwen2_moe", old(num_local_experts=8), "the key num_local_experts (8) is unknown"),
    ("qwen2_moe", gone("model.layers.0.mlp.shared_expert_gate.weight"), "no tensor model.layers.0.mlp.shared_expert_"),
    ("qwen3_moe", old(attention_bias=True), "attention_bias is True; a model must have biases in all linear layers or"),
    ("qwen3_moe", old(n_group=2), "the key n_group (2) is unknown"),
    ("qwen3_moe", old(routed_scaling_factor=2.5), "the key routed_scaling_factor (2.5) is unknown"),
    ("qwen3_moe", old(scoring_func="sigmoid"), "the key scoring_func"),
    ("qwen3_moe", old(first_k_dense_replace=1), "the key first_k_dense_replace (1) is unknown"),
    ("qwen3_moe", old(layer_types=["sliding_attention"] * 2), "the key layer_types"),
    ("qwen3_moe", old(moe_intermediate_size=11), "but config.json implies"),
    ("qwen3_moe", gone("model.layers.0.self_attn.q_norm.weight"), "no tensor model.layers.0.self_attn.q_norm.weight"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_it_is_refused_by_name(number: int, tmp_path: Path, written: dict[str, Path]) -> None:
    family, edit, message = REFUSED[number]
    copy_edited(written[family], tmp_path, edit)
    with pytest.raises(ValueError) as found:
        HFModelFolder(tmp_path)
    assert message in str(found.value)
    assert "\n" not in str(found.value)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, folder in found.items():
        write(folder, family, {}, nothing, "float32")
    return found


def copy_edited(source: Path, folder: Path, edit: Edit) -> None:
    from safetensors.torch import load_file, save_file

    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    edit(config, tensors)
    shutil.copytree(source, folder, dirs_exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")


def test_all_models_of_transformers_with_experts_are_neighbours_or_refused() -> None:
    """No model type whose configuration has experts is read, except the three families."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    from megatron_tools.convert.hf_config import read_config

    assert set(CONFIG_MAPPING_NAMES) >= NEIGHBOURS
    for kind in CONFIG_MAPPING_NAMES:
        config = getattr(transformers, CONFIG_MAPPING_NAMES[kind], None)
        fields = " ".join(getattr(config, "__dataclass_fields__", ()))
        if "expert" in fields and kind not in FAMILIES:
            with pytest.raises(ValueError, match=f"model_type is '{kind}'"):
                read_config({"model_type": kind}, Path("config.json"))


USUAL = (
    "--family llama --position-embedding rope --normalization rmsnorm --activation swiglu --no-hidden-bias "
    "--hidden-size 48 --num-layers 2 --num-experts 4"
)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--router-score sigmoid", "Mixtral does not support --router-score sigmoid"),
        ("--router-balance bias", "Mixtral does not support --router-balance bias"),
        ("--no-normalize-expert-weights", "Mixtral does not support --no-normalize-expert-weights"),
        ("--moe-layer-frequency 0 1", "Mixtral does not support --moe-layer-frequency 0 1"),
        ("--qkv-bias", "Mixtral does not support --qkv-bias"),
        ("--hidden-bias", "Mixtral does not support --hidden-bias"),
        ("--num-shared-experts 2", "Qwen2Moe does not support --num-shared-experts without --shared-expert-gate"),
        ("--num-shared-experts 2 --shared-expert-gate --hidden-bias", "Qwen2Moe does not support --hidden-bias"),
        ("--qk-norm --num-shared-experts 2", "Qwen3Moe does not support --num-shared-experts 2"),
        ("--qk-norm --qkv-bias", "Qwen3Moe does not support --qkv-bias"),
        ("--qk-norm --router-balance bias", "Qwen3Moe does not support --router-balance bias"),
    ],
)
def test_what_none_of_theirs_is(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"{message}$"):
        llama_config(parse(f"{USUAL} {flags}".split()).model, 64, 0, 0, "fp32")


def test_gpt2_and_t5_of_theirs_have_no_experts() -> None:
    with pytest.raises(ConfigError, match="GPT-2 does not support --num-experts 4"):
        gpt2_config(parse(["--family", "gpt2", "--num-experts", "4"]).model, 64, 0, 0, "fp32")
    with pytest.raises(ConfigError, match="T5 does not support --num-experts 4"):
        t5_config(parse(["--family", "t5", "--num-experts", "4"]).model, 0, 1, "fp32")
