"""Presets in configs/ are found by name, in a checkout and in an installation."""

import importlib.metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron import presets
from megatron.config.command_line import parse
from megatron.config.ds_config import resolve
from megatron.config.fields import ConfigError
from megatron.estimate.per_rank import rank_memory
from megatron.estimate.sizes import parameters, stages_of
from megatron_tools.convert.hf_llama import llama_config
from megatron_tools.plan.cluster import load_cluster
from tests.support import ROOT

# Preset -> max_position_embeddings in the config.json that the model's authors published.
READ = {
    **dict.fromkeys(("llama_1b", "llama_3b", "llama_8b", "llama_70b"), 131072),
    **dict.fromkeys(("qwen3_0.6b", "qwen3_1.7b", "qwen3_8b"), 40960),
    **dict.fromkeys(("mistral_7b", "mixtral_8x7b"), 32768),
    "qwen3-moe_30b-a3b": 40960,
}


@pytest.mark.parametrize("name", ["gpt2_345M", "gpt2_345M.json", "configs/models/gpt2_345M.json"])
def test_a_name_is_enough(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert presets.find_preset(name, "models") == ROOT / "configs/models/gpt2_345M.json"
    assert parse(["--config", name]).model.num_layers == 24


def test_presets_are_listed_for_a_misspelled_name_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing file of --param-groups or --deepspeed_config is no misspelled preset."""
    monkeypatch.chdir(tmp_path)
    for name in ("gpt3", "gpt2_smal.json"):
        with pytest.raises(ConfigError, match="gpt2_small"):
            parse(["--config", name])
    for flag in ("--param-groups", "--deepspeed_config"):
        with pytest.raises(ConfigError, match=r"x\.json") as error:
            resolve(parse([flag, "x.json", "--data-path", "a"]), 1, fast_bf16=False)
        assert "gpt2" not in str(error.value)


def test_a_file_of_ones_own_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2_345M.json").write_text('{"num_layers": 3}')
    assert parse(["--config", "gpt2_345M.json"]).model.num_layers == 3
    assert parse(["--config", "gpt2_345M"]).model.num_layers == 24
    assert presets.find_preset("mine/gpt2_345M.json", "models") == Path("mine/gpt2_345M.json")


def test_where_pip_put_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Presets are found at the paths that pip has recorded, even outside of site-packages, e.g. with pip --target."""
    there = tmp_path / "share/megatron-tds/configs/clusters"
    there.mkdir(parents=True)
    (there / "mine.json").write_text((ROOT / "configs/clusters/a100.json").read_text())
    recorded = importlib.metadata.PackagePath("../share/megatron-tds/configs/clusters/mine.json")
    recorded.dist = SimpleNamespace(locate_file=lambda path: tmp_path / "packages" / path)  # type: ignore[assignment]
    (tmp_path / "packages").mkdir()
    monkeypatch.setattr(presets, "_CHECKOUT", tmp_path / "nowhere")
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [recorded])
    presets.preset_folder.cache_clear()
    try:
        assert load_cluster("mine").devices_per_node == 8
    finally:
        presets.preset_folder.cache_clear()


@pytest.mark.parametrize("name", READ)
def test_models_read_as_far_as_published_at_no_cost(name: str) -> None:
    flags = ["--config", name, "--vocab-size", "32000", "--seq-length", "512"]
    config, short = parse(flags), parse([*flags, "--max-position-embeddings", "none"])
    assert (config.positions, short.positions) == (READ[name], 512)
    assert parse(["--config", name]).data.seq_length < READ[name]
    assert parameters(config) == parameters(short)
    memory = [rank_memory(c, resolve(c, 1, True), 1, True, stages_of(c)) for c in (config, short)]
    assert memory[0] == memory[1]


@pytest.mark.parametrize("name", READ)
def test_an_export_of_a_preset_says_how_far_it_reads(name: str) -> None:
    """The exported config.json of a preset states the published maximum length.

    For presets with llama3 RoPE scaling, this is the maximum length after scaling.
    """
    transformers = pytest.importorskip("transformers")
    config = parse(["--config", name, "--vocab-size", "32000"])
    described = llama_config(config.model, config.positions, 1, 2, "fp32")
    theirs = transformers.AutoConfig.for_model(**described)
    assert theirs.max_position_embeddings == READ[name]
    rope = theirs.rope_parameters
    if name.startswith("llama"):
        assert (rope["rope_type"], rope["original_max_position_embeddings"]) == ("llama3", 8192)
    else:
        assert rope["rope_type"] == "default" and "original_max_position_embeddings" not in rope


def test_what_a_preset_sets_can_be_turned_off() -> None:
    prefix = ["--config", "mistral_7b", "--objective", "prefix-lm"]
    assert parse([*prefix, "--sliding-window", "none"]).model.sliding_window is None
    with pytest.raises(ConfigError, match="--sliding-window"):
        parse(prefix)
    notes: list[str] = []
    assert parse(["--config", "llama_8b", "--rope-scaling", "none"], notify=notes.append).model.rope_scaling is None
    file = ROOT / "configs/models/llama_8b.json"
    assert notes == [
        f"{file}: {number} has no effect: --rope-scaling none does not use it"
        for number in ("--rope-scaling-factor 8.0", "--rope-original-length 8192")
    ]
