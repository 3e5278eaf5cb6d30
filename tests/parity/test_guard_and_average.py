"""With --skip-step-sigma and --ema-decay, every layout skips the steps and has the average of plain torch."""

from pathlib import Path

import numpy as np
import pytest

from tests.support import covering

from .guard_and_average import DECAY, GUARD, STEPS, Average, Guard, averages, skipped
from .layouts import LAYOUTS, Layout, ours, plain

CASES = [*LAYOUTS, Layout(2, 2, 1, zero=1)]
IN_CI = [Layout(2, 1, 1, schedule="zb-h1"), Layout(2, 2, 1, zero=1)]


@pytest.mark.parametrize("layout", covering(CASES, IN_CI.__contains__), ids=str)
def test_steps_and_average_equal_plain_torch(layout: Layout, tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    guard, average = Guard(), Average()
    expected = plain(tiny_data, vocab_file, "adam", rejects=guard, watch=average, steps=STEPS)
    flags = (*GUARD, "--ema-decay", str(DECAY))
    found = ours(layout, tmp_path, tiny_data, vocab_file, *flags, optimizer="adam", steps=STEPS)
    assert skipped(tmp_path) == guard.skipped
    assert len(guard.skipped) == 3
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert average.distance(averages(tmp_path)) < 1e-5
