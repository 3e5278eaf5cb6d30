"""With muP, every layout has the losses of plain torch with the factors of Yang et al. 2022, written by hand."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.parity.reference import Scales, Settings
from tests.support import covering

from .layouts import HEADS, HIDDEN, LAYERS, Layout, ours, plain

BASE_HIDDEN, BASE_HEAD, BASE_LAYERS = 8, 2, 2
WIDTH, DEPTH = HIDDEN / BASE_HIDDEN, math.sqrt(BASE_LAYERS / LAYERS)
MUP = {
    "mup_base_hidden_size": BASE_HIDDEN,
    "mup_base_kv_hidden_size": BASE_HEAD,
    "mup_base_num_layers": BASE_LAYERS,
    "mup_base_ff_hidden_size": 4 * HIDDEN,  # as in the wide model
}
FLAGS = [word for name, value in MUP.items() for word in (f"--{name.replace('_', '-')}", str(value))]
SCALES = Scales(attention=math.sqrt(BASE_HEAD) / (HIDDEN // HEADS), logits=1 / WIDTH, branch=DEPTH)


def factors(name: str) -> Settings:
    """Return the learning-rate factor, the weight decay and Adam's epsilon of each weight."""
    found = {"eps": 1e-8 / WIDTH}
    if name.startswith("layers."):
        matrix = name.endswith("weight") and "layernorm" not in name
        inputs = 1.0 if "dense_4h_to_h" in name else WIDTH
        factor = DEPTH / inputs
        found |= {"lr_factor": factor, "weight_decay": 0.01 / factor} if matrix else {"lr_factor": DEPTH}
    return found


CASES: list[tuple[Layout, Sequence[str]]] = [
    (Layout(0, 1, 1), ()),
    (Layout(2, 1, 2), ()),
    (Layout(2, 2, 1, zero=1), ()),
    (Layout(2, 1, 1, zero=1), ("--no-overlap-grad-reduce",)),
    (Layout(0, 2, 1, zero=2), ()),
    (Layout(0, 2, 1, zero=3), ()),
    (Layout(0, 1, 1, cp=2), ()),
]


@pytest.mark.parametrize("case", covering(CASES, CASES[1:3].__contains__), ids=str)
def test_losses_equal_plain_torch(
    case: tuple[Layout, Sequence[str]], tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    layout, more = case
    exact = not layout.zero
    found = ours(
        layout, tmp_path, tiny_data, vocab_file, *FLAGS, *more, optimizer="adam", precision="fp64" if exact else "fp32"
    )
    dtype = torch.float64 if exact else torch.float32
    expected = plain(tiny_data, vocab_file, "adam", dtype, settings=factors, scales=SCALES, **MUP)
    np.testing.assert_allclose(found, expected, rtol=1e-10 if exact else 1e-5)
