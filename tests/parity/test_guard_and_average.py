"""With --skip-step-sigma and --ema-decay, every layout skips the steps and has the average of plain torch."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support import covering

from .guard_and_average import DECAY, GUARD, STEPS, Average, Guard, averages, skipped
from .layouts import LAYOUTS, Layout, ours, plain

# fp64 is for ZeRO stage 0 only.
CASES = [(layout, "fp32") for layout in (*LAYOUTS, Layout(2, 2, 1, zero=1))]
CASES += [(layout, "fp64") for layout in LAYOUTS if not layout.zero]
IN_CI = [(Layout(2, 1, 1, schedule="zb-h1"), "fp64")]


@pytest.mark.parametrize(("layout", "precision"), covering(CASES, IN_CI.__contains__, several=True), ids=str)
def test_steps_and_average_equal_plain_torch(
    layout: Layout, precision: str, tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    guard, average = Guard(), Average()
    dtype = {"fp32": torch.float32, "fp64": torch.float64}[precision]
    expected = plain(tiny_data, vocab_file, "adam", dtype, rejects=guard, watch=average, steps=STEPS)
    flags = (*GUARD, "--ema-decay", str(DECAY))
    found = ours(layout, tmp_path, tiny_data, vocab_file, *flags, optimizer="adam", steps=STEPS, precision=precision)
    assert skipped(tmp_path) == guard.skipped
    assert len(guard.skipped) == 3
    tolerance = {"fp32": 1e-5, "fp64": 1e-10}[precision]
    np.testing.assert_allclose(found, expected, rtol=tolerance)
    assert average.distance(averages(tmp_path)) < tolerance
