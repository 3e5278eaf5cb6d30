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
# A rule for all biases, which the next rule overrides in layer 0; a frozen layer; weights with a lower learning rate;
# an embedding without weight decay.
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
# fp64 is for ZeRO stage 0 only.
RUNS = [(case, layout, "fp32") for case in CASES for layout in LAYOUTS]
RUNS += [(case, layout, "fp64") for case in CASES for layout in LAYOUTS if not layout[0].zero]
IN_CI = [("mixed", LAYOUTS[3], "fp64"), ("first-stage", LAYOUTS[5], "fp32")]


@pytest.mark.parametrize(("case", "layout", "precision"), covering(RUNS, IN_CI.__contains__, several=True), ids=str)
def test_losses_equal_plain_torch(
    case: str,
    layout: tuple[Layout, tuple[str, ...]],
    precision: str,
    tmp_path: Path,
    tiny_data: str,
    vocab_file: str,
) -> None:
    rules, settings = CASES[case]
    file = tmp_path / "groups.json"
    file.write_text(json.dumps(rules))
    where, more = layout
    flags = ("--param-groups", str(file), *more)
    found = ours(where, tmp_path / "run", tiny_data, vocab_file, *flags, optimizer="adam", precision=precision)
    dtype, tolerance = {"fp32": (torch.float32, 1e-5), "fp64": (torch.float64, 1e-10)}[precision]
    expected = plain(tiny_data, vocab_file, "adam", dtype, settings=settings)
    np.testing.assert_allclose(found, expected, rtol=tolerance)


@pytest.mark.parametrize("case", CASES)
def test_the_settings_matter(case: str, tiny_data: str, vocab_file: str) -> None:
    """The losses of plain torch differ with the settings, so the comparisons can detect ignored settings."""
    found = [
        plain(tiny_data, vocab_file, "adam", torch.float64, settings=each)
        for each in (CASES[case][1], default_settings)
    ]
    assert abs(found[0][-1] / found[1][-1] - 1) > 1e-3
