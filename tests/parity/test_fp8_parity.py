"""With --precision fp8, losses are those of plain torch with the same rounding, in every kind of layout."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support import FULL, covering, losses, train

from .layouts import Layout, ours, plain
from .reference import Fp8Product

LAYOUTS = [
    (Layout(0, 1, 1, zero=1), ""),
    (Layout(1, 1, 2, zero=1), "--sequence-parallel"),
    (Layout(2, 1, 1, zero=1), "--checkpoint-activations"),
    (Layout(2, 1, 2, zero=1), ""),
    (Layout(2, 1, 1, zero=1), "--pipeline-schedule zb-h1"),
    (Layout(0, 2, 1, zero=2), ""),
    (Layout(0, 2, 1, zero=3), "--recompute-modules norm qkv activation"),
]


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return Fp8Product.apply(x, weight)  # type: ignore[no-untyped-call,no-any-return]


@pytest.fixture(scope="module")
def expected(tiny_data: str, vocab_file: str) -> list[float]:
    return plain(tiny_data, vocab_file, multiply=product)


@pytest.mark.parametrize(("layout", "more"), covering(LAYOUTS, LAYOUTS[1:2].__contains__, several=True))
def test_losses_equal_plain_torch_with_the_same_rounding(
    layout: Layout, more: str, expected: list[float], tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    """The tolerance is that of bf16 runs, as outside of fp8 matmuls our run is in bf16 and plain torch in fp32."""
    found = ours(layout, tmp_path, tiny_data, vocab_file, *more.split(), precision="fp8")
    np.testing.assert_allclose(found, expected, rtol=2e-3)


LLAMA = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-key-value-heads 2 --ff-hidden-size 64 --split 1 "
    "--seq-length 24 --batch-size 4 --lr 1e-2 --lr-decay-style constant --warmup 0 --train-iters 12 --log-interval 1 "
    "--eval-iters 0 --seed 7 --no-tensorboard --zero-stage 1"
)


@FULL
def test_llama_learns_as_in_bf16_in_every_layout(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """Losses of layouts differ only by the order of bf16 sums; those of bf16 differ by at most 2%, but do differ."""

    def run(name: str, ranks: int, flags: str) -> list[float]:
        files = ["--data-path", tiny_data, "--vocab-file", vocab_file]
        return losses(train("llama", ranks, tmp_path / name, *files, *LLAMA.split(), *flags.split()))

    one, bf16 = (run(name, 1, f"--precision {name}") for name in ("fp8", "bf16"))
    for name, flags in (("tp", "--model-parallel-size 2"), ("pp", "--pipe-parallel-size 2")):
        np.testing.assert_allclose(run(name, 2, f"--precision fp8 {flags}"), one, rtol=5e-3)
    np.testing.assert_allclose(one, bf16, rtol=0.02)
    assert one[0] - one[-1] > 0.3 and max(abs(a - b) for a, b in zip(one, bf16, strict=True)) > 1e-4


def test_a_run_resumes_in_another_precision(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """A checkpoint of fp8 holds what one of bf16 holds, so each resumes the other."""
    files = ["--data-path", tiny_data, "--vocab-file", vocab_file]
    for step, precision in ((2, "bf16"), (4, "fp8"), (6, "bf16")):
        more = f"--train-iters {step} --save-interval 2 --precision {precision}"
        rows = train("llama", 1, tmp_path, *files, *LLAMA.split(), *more.split())
    assert len(losses(rows)) == 6
