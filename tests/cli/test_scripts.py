"""What run_*.sh say before they install, prepare or train anything."""

import re
from pathlib import Path

import pytest

from tests.support import ROOT, command

NAMES = ("gpt2", "llama", "t5")
LISTED = [line.split()[0] for line in (ROOT / "scripts" / "variables.txt").read_text().splitlines()]
INTERNAL = {"TORCH_CPP_LOG_LEVEL", "TORCH_EXTENSIONS_DIR"}  # of libraries; a run is the same without


@pytest.mark.parametrize("name", NAMES)
def test_help_needs_nothing(name: str, tmp_path: Path) -> None:
    done = command(
        "bash", f"scripts/run_{name}.sh", "--help", env={"PYTHON": "/no/python", "RUN_DIR": str(tmp_path / "r")}
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"bash scripts/run_{name}.sh" in done.stdout
    assert all(re.search(rf"^  {variable} ", done.stdout, flags=re.MULTILINE) for variable in LISTED)


def test_every_variable_that_is_read_is_listed() -> None:
    texts = [
        path.read_text()
        for path in (ROOT / "scripts").glob("*.sh")
        if path.name[:4] in ("_run", "_pre", "run_", "setu", "_tor")
    ]
    read = {name for text in texts for name in re.findall(r"\$\{([A-Z][A-Z_]+):-", text)}
    assert {name for name in read - INTERNAL if not name.startswith("SLURM_")} == set(LISTED)


@pytest.mark.parametrize(
    ("env", "argv", "words"),
    [
        ({"TRAIN_ITER": "5"}, [], "the variable TRAIN_ITER is read by nobody; did you mean TRAIN_ITERS?"),
        ({"BATCH_SIZE": "5"}, [], "did you mean BATCHSIZE?"),
        ({"MODEL_SIZE": "9b"}, [], "there is no MODEL_SIZE=9b of gpt2; there are: 1.3B 2.7B 3.7B 345M small"),
        ({}, ["--hidden-sise", "3"], "unknown argument --hidden-sise; did you mean --hidden-size?"),
        ({"NHEADS": "3"}, ["--lr", "0.1"], "--num-attention-heads 3"),
    ],
)
def test_a_mistake_costs_nothing(env: dict[str, str], argv: list[str], words: str, tmp_path: Path) -> None:
    """Other libraries' variables are none of ours."""
    around = {"RUN_DIR": str(tmp_path / "run"), "MKL_NUM_THREADS": "1", "WORLD_SIZE": "1"}
    done = command("bash", "scripts/run_gpt2.sh", *argv, env={**around, **env})
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()
