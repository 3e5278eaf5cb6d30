"""Background saves: training continues while a thread copies the state; the checkpoint has the state of its step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tds import optimizer_state
from tests.support import covering, on_ranks

from .runs import Start, run_all, whole_tensors

ITERATIONS = 4
STATES = [
    (1, "--precision fp32"),
    (1, "--precision fp64 --pipe-parallel-size 0"),
    (2, "--precision bf16 --zero-stage 1 --overlap-param-gather"),
    (2, "--precision fp32 --zero-stage 1 --overlap-param-gather --pipe-parallel-size 0"),
    (1, "--precision bf16 --zero-stage 1 --no-overlap-grad-reduce"),
    (2, "--precision fp16 --zero-stage 2 --pipe-parallel-size 0"),
    (2, "--precision bf16 --zero-stage 3 --pipe-parallel-size 0"),
]


def _train(folder: str, flags: str, data: str, vocab_file: str) -> None:
    @contextmanager
    def slow(device: Any) -> Iterator[None]:
        time.sleep(0.3)  # several steps of training
        yield

    flags += f" --batch-size 2 --train-iters {ITERATIONS} --save-interval 1 --keep-last {ITERATIONS}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_state, "side_stream", slow)
        starts = [Start("gpt2", Path(folder, way), f"{flags} {way}") for way in ("--async-save", "")]
        run_all(starts, data, vocab_file)


@pytest.mark.parametrize(("ranks", "flags"), covering(STATES, (STATES[0], STATES[2]).__contains__, several=True))
def test_a_slow_copy_has_the_state_of_its_step(
    ranks: int, flags: str, tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    on_ranks(ranks, _train, str(tmp_path), flags, tiny_data, vocab_file)
    for iteration in range(1, ITERATIONS + 1):
        found, expected = (
            whole_tensors(tmp_path / way / "checkpoints" / f"iter_{iteration:07d}") for way in ("--async-save", "")
        )
        assert found.keys() == expected.keys() and len(found) > 10
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=f"{name} of iteration {iteration}")
