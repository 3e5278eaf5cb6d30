"""A run whose directory was removed, renamed or replaced ends, and never mixes its files with those of another run."""

import contextlib
import dataclasses
import io
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.checkpointing import CheckpointReader, TrainState, find_checkpoint
from megatron.locks.held_places import LostPlace
from megatron.locks.run_lock import LOCK_FILE, Holder
from megatron.ranks.errors import RunError
from megatron.ranks.signals import StopSignal
from megatron.training.loop import train
from megatron.training.saves import Saves
from tests.checkpoints.runs import Start, make
from tests.support import FULL, on_ranks


def _loses_its_place(run_dir: Path, how: str, flags: str, data: str, vocab_file: str) -> str:
    """Move or replace the run directory after iteration 2; return the error that ends the run."""
    aside, done = run_dir.with_name("aside"), [0]

    def train_batch(*args: Any) -> Any:
        done[0] += 1
        if done[0] == 3 and os.environ["RANK"] == "0":
            shutil.rmtree(run_dir) if how == "removed" else run_dir.rename(aside)
            if how == "finished run":
                (run_dir / "checkpoints" / "iter_0000001").mkdir(parents=True)
                (run_dir / "checkpoints" / "latest").write_text("iter_0000001")
                (run_dir / "metrics.jsonl").write_text("{}\n")
            if how == "replaced":
                run_dir.mkdir()
                other = dataclasses.replace(Holder.here(), pid=os.getppid())
                (run_dir / LOCK_FILE).write_text(json.dumps(dataclasses.asdict(other)))
        return honest(*args)

    with (
        pytest.raises(RunError) as error,
        contextlib.redirect_stdout(io.StringIO()),
        make(Start("gpt2", run_dir, flags), data, vocab_file) as run,
    ):
        honest = run.engine.train_batch
        run.engine.train_batch = train_batch  # type: ignore[method-assign]
        train(run)
    return str(error.value)


@pytest.mark.parametrize(
    ("how", "ranks", "flags"),
    [
        ("removed", 1, ""),
        ("renamed", 2, "--async-save"),
        ("replaced", 1, "--async-save"),
        pytest.param("replaced", 2, "", marks=FULL),
        ("finished run", 1, "--keep-last 1"),
        ("finished run", 2, "--async-save"),
    ],
)
def test_a_run_whose_directory_is_gone_ends(
    how: str, ranks: int, flags: str, tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    """It saves if no other run uses the place, and it leaves no file in the directory of another run."""
    run_dir = tmp_path / "run"
    flags += " --train-iters 50 --save-interval 2"
    words = on_ranks(ranks, _loses_its_place, run_dir, how, flags, tiny_data, vocab_file)
    assert all(str(run_dir) in each for each in words)
    if how == "replaced":
        assert [path.name for path in run_dir.iterdir()] == [LOCK_FILE]
        return
    if how == "finished run":
        left = sorted(str(path.relative_to(run_dir)) for path in run_dir.rglob("*"))
        assert left == ["checkpoints", "checkpoints/iter_0000001", "checkpoints/latest", "metrics.jsonl"]
        assert (run_dir / "metrics.jsonl").read_text() == "{}\n"
        return
    reader = CheckpointReader(find_checkpoint(str(run_dir)))
    reader.verify()
    assert 3 <= reader.state["iteration"] <= 4
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) <= 3
    assert not (run_dir / LOCK_FILE).exists()


class _NoFeatures(list[Any]):
    def state(self) -> dict[str, Any]:
        return {}


def test_a_run_that_lost_its_folder_after_skipped_steps_saves_the_last_good_state_again() -> None:
    """Iteration 100 was saved, but its checkpoint is gone with the folder, and steps 101 to 103 were skipped."""
    saved = []
    log = SimpleNamespace(check=lambda: None, has_unreported=False)
    log.health = SimpleNamespace(state_to_save=lambda state: TrainState(iteration=100))
    saver = SimpleNamespace(failures=0, is_pending=False, is_writing=False)
    saver.save = lambda state, must_succeed: saved.append((state.iteration, must_succeed))
    run: Any = SimpleNamespace(state=TrainState(iteration=100), saver=saver, log=log, stop=False)
    run.config = SimpleNamespace(checkpoint=SimpleNamespace(exit_interval=None, save_interval=0))
    run.signals = SimpleNamespace(agree=lambda is_written: (StopSignal.SAVE_AND_STOP, is_written))
    run.features = _NoFeatures()
    places: Any = SimpleNamespace(find_lost=lambda: LostPlace("runs/mine was removed", is_retaken=True))
    saves = Saves(run, places)
    run.state = TrainState(iteration=103)
    samples: Any = SimpleNamespace(iteration=103)
    with pytest.raises(RunError, match="runs/mine"):
        saves.after_step(None, samples)
    assert saved == [(100, True)]
