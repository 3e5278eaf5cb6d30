"""scripts/train_performance.sh and train_full.sh train a model size by name and report its results."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.sentences import SENTENCES
from tests.support import FULL, ROOT, command

SMALL = [
    "--num-layers",
    "2",
    "--hidden-size",
    "32",
    "--num-attention-heads",
    "4",
    "--seq-length",
    "32",
    "--hidden-dropout",
    "0",
    "--attention-dropout",
    "0",
]


def facts_of(stdout: str) -> dict[str, str]:
    """Return the lines of the report in the output of a script, as name -> value."""
    pairs = [line.split("  ", 1) for line in stdout.splitlines() if "  " in line.strip()]
    return {name: value.strip() for name, value in pairs}


@FULL
def test_performance_measures_and_saves_nothing_but_the_report(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """train_performance.sh leaves checkpoints in the run directory untouched and saves only its report."""
    mine = tmp_path / "run" / "checkpoints" / "mine"
    mine.parent.mkdir(parents=True)
    mine.touch()
    for ending in ("bin", "idx"):
        shutil.copy(f"{tiny_data}.{ending}", tmp_path / f"mine.{ending}")
    env = {**os.environ, "RUN_DIR": "run", "VOCAB_FILE": vocab_file, "OMP_NUM_THREADS": "1"}
    argv = ["--data_path=mine", "--model_size", "345M", "--train_iters=3", *SMALL]
    # The script must move the metrics of an earlier measurement to metrics-1.jsonl instead of resuming that run.
    (tmp_path / "run" / "metrics.jsonl").write_text("of an earlier measurement")
    script = str(ROOT / "scripts" / "train_performance.sh")
    done = subprocess.run(
        ["bash", script, *argv], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert SENTENCES["pipe_1_x_data_1_x"] in done.stdout
    facts = facts_of(done.stdout)
    assert facts["iterations"] == "3" and "best validation loss" not in facts
    assert float(facts["median speed"].split()[0].replace(",", "")) > 0
    assert (tmp_path / "run" / "report.html").is_file()
    assert [path.name for path in mine.parent.iterdir()] == ["mine"]
    assert (tmp_path / "run" / "metrics-1.jsonl").read_text() == "of an earlier measurement"
    assert not (tmp_path / "run" / "measured").exists()


@FULL  # skipped by default, since other tests cover much of train_full.sh
def test_full_evaluates_saves_and_continues(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    env = {"RUN_DIR": str(tmp_path), "VOCAB_FILE": vocab_file}
    for iterations in ("2", "4"):
        argv = ["--data_path", tiny_data, "--model_size=345M_without_mp", "--train_iters", iterations, *SMALL]
        done = command("bash", "scripts/train_full.sh", *argv, "--split", "1,1,0", env=env)
        assert done.returncode == 0, done.stderr[-2000:]
        assert "data 2 x model 1" in done.stdout
    assert SENTENCES["resumed_at_iteration_2"] in done.stdout
    facts = facts_of(done.stdout)
    assert facts["iterations"] == "4" and "perplexity" in facts["best validation loss"]
    assert (tmp_path / "checkpoints" / "iter_0000004").is_dir()


@pytest.mark.parametrize(
    ("argv", "said"),
    [(["--model_size", "7B"], "not one of 345M, 345M_without_mp, 1.3B, 2.7B, 3.7B"), (["--train_iters"], "usage:")],
)
def test_what_cannot_be_is_said_in_a_sentence(argv: list[str], said: str) -> None:
    done = command("bash", "scripts/train_full.sh", *argv)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_folder_without_a_single_pair(tmp_path: Path) -> None:
    done = command(
        "bash", "scripts/train_full.sh", "--data_path", str(tmp_path), env={"RUN_DIR": str(tmp_path / "run")}
    )
    assert done.returncode == 2
    assert SENTENCES["must_contain_one_bin_idx_pair"] in done.stderr
