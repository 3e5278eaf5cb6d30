"""Two rows of the table of releases with the installed release, and the refusal of a route that is wrong."""

from typing import Any

import pytest

import tds
from tests.support import on_ranks

from .routes import Measured, Route, _config, layers
from .rows import SCRIPTS, gone, judge, outcomes, run_script


def test_the_installed_release_is_right_without_and_with_a_pipeline() -> None:
    for route in (Route("plain", "bf16", 0, 4, "AdamW"), Route("pipeline", "fp32", 1, 4, "sharded")):
        assert outcomes([route]) == {route.name: "right"}
    assert run_script(SCRIPTS[3]) == "right"
    assert gone() == []


@pytest.mark.parametrize(
    ("measured", "found"),
    [
        (Measured(1.0, None, 0.0, 0.0), "right"),
        (Measured(0.25, 1.0, 0.0, 0.0), "wrong: gradients x 0.25"),
        (Measured(float("nan"), 1.0, 0.0, 0.0), "wrong: gradients x nan"),
        (Measured(1.0, 256.0, 0.0, 0.0), "wrong: gradient norm x 256"),
        (Measured(1.0, 1.0, 0.0, 1.0), "wrong: weights"),
    ],
)
def test_each_deviation_is_judged(measured: Measured, found: str) -> None:
    assert judge(measured, "fp32") == found


def _refusal(version: str, zero: int, reduces: bool) -> str:
    import torch
    from torch import nn

    from tds import _deepspeed

    patch: Any = pytest.MonkeyPatch()
    patch.setattr(_deepspeed.deepspeed, "__version__", version)
    if version < "0.19":
        patch.setenv("TDS_ANY_DEEPSPEED", "1")
    if not reduces:  # a bug of DeepSpeed 0.18.5 to 0.18.9
        patch.setattr(_deepspeed.DeepSpeedEngine, "_reduce_non_expert_gradients", lambda *_: None)
    model = nn.Sequential(*layers())
    config = _config(Route("plain", "fp32", zero, 2, "SGD"))
    try:
        tds.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)
    except ValueError as error:
        return str(error)
    finally:
        patch.undo()
    return "taken"


def test_wrong_routes_of_a_release_are_refused() -> None:
    for found in on_ranks(2, _refusal, "0.19.7", 3, True):
        assert "0.19.7 with ZeRO 3 on CPUs" in found
    assert on_ranks(2, _refusal, "0.19.8", 3, True) == ["taken"] * 2
    assert on_ranks(2, _refusal, "0.18.6", 0, True) == ["taken"] * 2
    for found in on_ranks(2, _refusal, "0.18.6", 0, False):  # each replica would learn from its own gradient only
        assert "fp32 with ZeRO 0" in found
