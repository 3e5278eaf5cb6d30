"""Background saves: training continues while a thread copies the state; the checkpoint has the state of its step."""

import contextlib
import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.ranks.errors import RunError
from megatron.training import train
from tds import optimizer_state
from tests.conformance.engines import remembered_groups
from tests.support import covering, on_ranks

from .runs import Start, make, run_all, whole_tensors

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


@pytest.mark.parametrize(("ranks", "flags"), covering(STATES, STATES[:1].__contains__, several=True))
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


def _failing(folder: str, data: str, vocab_file: str, error: type[Exception]) -> None:
    """End a run by `error` in the iteration after the one in which its only background save began."""
    with remembered_groups() as begin, contextlib.redirect_stdout(io.StringIO()):
        begin()
        flags = f"--precision fp32 --batch-size 2 --train-iters {ITERATIONS} --async-save --save-interval 2"
        with make(Start("gpt2", Path(folder), flags), data, vocab_file) as run:
            honest = run.engine.train_batch

            def train_batch(*args: Any) -> Any:
                if run.state.iteration == 2:
                    raise error("the run fails")
                return honest(*args)

            run.engine.train_batch = train_batch  # type: ignore[method-assign]
            with pytest.raises(error, match="the run fails"):
                train(run)


@pytest.mark.parametrize(("ranks", "error"), [(1, ZeroDivisionError), (2, RunError)])
def test_an_error_that_all_ranks_have_completes_a_background_save(
    ranks: int, error: type[Exception], tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    on_ranks(ranks, _failing, str(tmp_path), tiny_data, vocab_file, error)
    assert [path.name for path in (tmp_path / "checkpoints").glob("iter_*")] == ["iter_0000002"]
    assert whole_tensors(tmp_path / "checkpoints" / "iter_0000002")
    assert (tmp_path / "checkpoints" / "latest").read_text().startswith("iter_0000002")
