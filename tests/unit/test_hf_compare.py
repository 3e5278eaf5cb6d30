"""`convert_checkpoint --verify` sees every difference that depends on positions, however far apart tokens must be."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.command_line import with_values
from megatron.model import GPT2Model, T5Model, global_parameters
from megatron_tools.convert.hf_compare import compare
from megatron_tools.convert.hf_folder import Folder
from tests.unit.test_hf_configs import nothing, write

LONG = {"max_position_embeddings": 300}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 2.0, "original_max_position_embeddings": 150}


def imported(folder: Path, family: str, settings: dict[str, Any]) -> tuple[Folder, dict[str, torch.Tensor]]:
    """Save a model of transformers in `folder` and return it as imported: (settings, weights by name)."""
    write(folder, family, settings, nothing, "float32")
    found = Folder(folder)
    model: Any = (T5Model if found.config.is_t5 else GPT2Model)(found.config, parallel_output=False)
    found.load(model)
    return found, {name: p.detach().clone() for name, p in global_parameters(model)}


@pytest.mark.parametrize("window", [81, None, 79])
@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_another_window_is_found(family: str, window: int | None, tmp_path: Path) -> None:
    settings = {**LONG, "use_sliding_window": True, "max_window_layers": 0} if family == "qwen2" else LONG
    found, weights = imported(tmp_path, family, {**settings, "sliding_window": 80})
    assert found.config.model.sliding_window == 80
    compare(found.config, weights.__getitem__, tmp_path)
    path = tmp_path / "config.json"
    other = {"sliding_window": window}
    if window is None and family == "qwen2":
        other = {"use_sliding_window": False, "layer_types": None}
    path.write_text(json.dumps(json.loads(path.read_text()) | other))
    with pytest.raises(ValueError, match="not the same model"):
        compare(found.config, weights.__getitem__, tmp_path)


def test_a_missing_window_of_ours_is_found(tmp_path: Path) -> None:
    found, weights = imported(tmp_path, "mistral", {**LONG, "sliding_window": 80})
    other = with_values(found.config, {"sliding_window": None})
    with pytest.raises(ValueError, match="not the same model"):
        compare(other, weights.__getitem__, tmp_path)


@pytest.mark.parametrize(("first", "last"), [(64, 256), (255, 256)])
def test_learned_positions_are_compared_to_the_last(first: int, last: int, tmp_path: Path) -> None:
    found, weights = imported(tmp_path, "gpt2", {"n_positions": 256})
    compare(found.config, weights.__getitem__, tmp_path)
    weights["position_embedding.weight"][first:last] = 0
    with pytest.raises(ValueError, match="not the same model"):
        compare(found.config, weights.__getitem__, tmp_path)


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_all_buckets_of_relative_positions_are_compared(stack: str, tmp_path: Path) -> None:
    found, weights = imported(tmp_path, "t5", {"relative_attention_max_distance": 90})
    compare(found.config, weights.__getitem__, tmp_path)
    name = next(name for name in weights if name.startswith(stack) and "relative_positions" in name)
    weights[name][-1] += 1  # the bucket of the largest distances
    with pytest.raises(ValueError, match="not the same model"):
        compare(found.config, weights.__getitem__, tmp_path)


@pytest.mark.parametrize(
    ("family", "settings", "length"),
    [
        ("llama", {"max_position_embeddings": 24}, 24),
        ("llama", {**LONG, "rope_parameters": YARN}, 167),
        ("mistral", {**LONG, "sliding_window": 80}, 97),
        ("mistral", {**LONG, "sliding_window": 3000}, 300),
        ("t5", {"relative_attention_max_distance": 90}, 107),
        ("gpt2", {"n_positions": 256}, 256),
    ],
)
def test_the_number_of_tokens_is_reported(
    family: str, settings: dict[str, Any], length: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, weights = imported(tmp_path, family, settings)
    capsys.readouterr()
    compare(found.config, weights.__getitem__, tmp_path)
    assert f" {length} tokens" in capsys.readouterr().out
