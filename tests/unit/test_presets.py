"""The JSON files of configs/: by name, in a checkout and where pip put them."""

import importlib.metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron import presets
from megatron.config.command_line import parse
from megatron.planning.cluster import load_cluster
from tests.support import ROOT


@pytest.mark.parametrize("name", ["gpt2_345M", "gpt2_345M.json", "configs/models/gpt2_345M.json"])
def test_a_name_is_enough(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert presets.find(name, "models") == ROOT / "configs/models/gpt2_345M.json"
    assert parse(["--config", name]).model.num_layers == 24


def test_a_file_of_ones_own_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2_345M.json").write_text('{"num_layers": 3}')
    assert parse(["--config", "gpt2_345M.json"]).model.num_layers == 3
    assert parse(["--config", "gpt2_345M"]).model.num_layers == 24
    assert presets.find("mine/gpt2_345M.json", "models") == Path("mine/gpt2_345M.json")


def test_where_pip_put_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record of an installation with --target names them by a path that leads out of site-packages."""
    there = tmp_path / "share/megatron-tds/configs/clusters"
    there.mkdir(parents=True)
    (there / "mine.json").write_text((ROOT / "configs/clusters/a100.json").read_text())
    recorded = importlib.metadata.PackagePath("../share/megatron-tds/configs/clusters/mine.json")
    recorded.dist = SimpleNamespace(locate_file=lambda path: tmp_path / "packages" / path)  # type: ignore[assignment]
    (tmp_path / "packages").mkdir()
    monkeypatch.setattr(presets, "_CHECKOUT", tmp_path / "nowhere")
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [recorded])
    presets.folder.cache_clear()
    try:
        assert load_cluster("mine").devices_per_node == 8
    finally:
        presets.folder.cache_clear()
