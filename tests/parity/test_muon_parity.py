"""With Muon, every layout has the losses of torch.optim.Muon and AdamW in one process of plain torch."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support import covering

from .layouts import Layout, ours, plain


@functools.cache
def expected(data: str, vocab_file: str) -> list[float]:
    return plain(data, vocab_file, optimizer="muon", dtype=torch.float64)


FP64 = [
    Layout(0, 1, 1),
    Layout(0, 2, 1),
    Layout(0, 1, 2),
    Layout(0, 1, 4),
    Layout(2, 1, 1),
    Layout(0, 1, 2, cp=2),
    Layout(2, 2, 2),
]
FP32 = [Layout(0, 1, 1), Layout(0, 2, 1, zero=1), Layout(0, 2, 2, zero=1), Layout(2, 2, 1, zero=1), Layout(2, 2, 2)]


@pytest.mark.parametrize("layout", covering(FP64, (FP64[2], FP64[6]).__contains__), ids=str)
def test_in_fp64_nothing_but_the_order_of_sums_differs(
    layout: Layout, tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    found = ours(layout, tmp_path, tiny_data, vocab_file, optimizer="muon", precision="fp64")
    np.testing.assert_allclose(found, expected(tiny_data, vocab_file), rtol=1e-10)


@pytest.mark.parametrize("layout", covering(FP32, FP32[2:3].__contains__), ids=str)
def test_in_fp32(layout: Layout, tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    found = ours(layout, tmp_path, tiny_data, vocab_file, optimizer="muon")
    np.testing.assert_allclose(found, expected(tiny_data, vocab_file), rtol=1e-5)


def test_the_reference_learns(tiny_data: str, vocab_file: str) -> None:
    losses = expected(tiny_data, vocab_file)
    assert losses[0] - losses[-1] > 0.3
