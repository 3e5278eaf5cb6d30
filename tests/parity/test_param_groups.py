"""With --param-groups, every layout has the losses of plain torch with the same parameter groups."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.parity.reference import Settings, default_settings
from tests.support import covering

from .layouts import Layout, ours, plain

Rules = list[dict[str, Any]]
# A rule for biases that a later rule overrides in one layer, frozen and slow layers, and an embedding without decay.
MIXED: Rules = [
    {"pattern": "*.bias", "weight_decay": 0.05, "lr_factor": 2},
    {"pattern": "layers.0.*", "frozen": True},
    {"pattern": "layers.[12].mlp.*", "lr_factor": 0.25},
    {"pattern": "embedding.word_embeddings.weight", "weight_decay": 0, "lr_factor": 0.5},
]
# With two stages, the first stage trains nothing. The tied embedding is frozen on both stages.
FIRST_STAGE: Rules = [
    {"pattern": "*", "frozen": True},
    {"pattern": "layers.[23].*", "frozen": False},
    {"pattern": "final_norm.*", "frozen": False, "lr_factor": 0.5},
]


def mixed(name: str) -> Settings:
    """Return the settings of MIXED, written by hand."""
    if name.startswith("layers.0."):
        return None
    found = {"weight_decay": 0.05, "lr_factor": 2.0} if name.endswith(".bias") else {}
    if name.startswith(("layers.1.mlp.", "layers.2.mlp.")):
        found["lr_factor"] = 0.25
    return {"weight_decay": 0.0, "lr_factor": 0.5} if name.startswith("embedding") else found


def first_stage(name: str) -> Settings:
    """Return the settings of FIRST_STAGE, written by hand."""
    if name.startswith("final_norm."):
        return {"lr_factor": 0.5}
    return {} if name.startswith(("layers.2.", "layers.3.")) else None


CASES: dict[str, tuple[Rules, Callable[[str], Settings]]] = {
    "mixed": (MIXED, mixed),
    "first-stage": (FIRST_STAGE, first_stage),
}
DEEPSPEED = ("--no-overlap-grad-reduce",)  # DeepSpeed's ZeRO 1 instead of tds.DistributedOptimizer
LAYOUTS: list[tuple[Layout, tuple[str, ...]]] = [
    (Layout(0, 1, 1), ()),
    (Layout(2, 1, 1), ()),
    (Layout(2, 2, 1), ()),
    (Layout(2, 1, 2), ()),
    (Layout(0, 2, 1, zero=1), ()),
    (Layout(2, 2, 1, zero=1), ()),
    (Layout(2, 2, 1, zero=1), DEEPSPEED),
    (Layout(0, 2, 1, zero=1), DEEPSPEED),
    (Layout(0, 2, 1, zero=2), ()),
    (Layout(0, 2, 1, zero=3), ()),
]
RUN = [("mixed", LAYOUTS[3]), ("first-stage", LAYOUTS[5]), ("first-stage", LAYOUTS[6])]


@pytest.mark.parametrize(
    ("case", "layout"), covering([(c, w) for c in CASES for w in LAYOUTS], RUN.__contains__, several=True), ids=str
)
def test_losses_equal_plain_torch(
    case: str, layout: tuple[Layout, tuple[str, ...]], tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    rules, settings = CASES[case]
    file = tmp_path / "groups.json"
    file.write_text(json.dumps(rules))
    where, more = layout
    found = ours(where, tmp_path / "run", tiny_data, vocab_file, "--param-groups", str(file), *more, optimizer="adam")
    expected = plain(tiny_data, vocab_file, optimizer="adam", settings=settings)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_the_settings_matter(case: str, tiny_data: str, vocab_file: str) -> None:
    """The losses of plain torch differ with the settings, so the comparisons can detect ignored settings."""
    found = [
        plain(tiny_data, vocab_file, "adam", torch.float64, settings=each)
        for each in (CASES[case][1], default_settings)
    ]
    assert abs(found[0][-1] / found[1][-1] - 1) > 1e-3
