"""Tools that read beside a run that deletes old checkpoints: they read the newest one again, or say what happened."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing import CheckpointReader, find_checkpoint
from megatron.checkpointing.files import point_latest_to
from megatron_tools.convert import average_checkpoints, convert_checkpoint
from megatron_tools.write import evaluate, generate
from tests.checkpoints.runs import Start, run_all
from tests.support import on_ranks


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_data: str, vocab_file: str) -> Path:
    path = tmp_path_factory.mktemp("runs") / "gpt2"
    flags = "--num-layers 2 --batch-size 2 --train-iters 4 --save-interval 1 --precision fp32"
    on_ranks(1, run_all, [Start("gpt2", path, flags)], tiny_data, vocab_file)
    return path


@pytest.fixture
def run_dir(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that saves its third checkpoint, and deletes the older ones, while a tool verifies the second."""
    shutil.copytree(made, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    later = tmp_path / "later"
    for name in ("iter_0000003", "iter_0000004"):
        (folder / name).rename(tmp_path / f"later-{name}")
    point_latest_to(folder / "iter_0000002")
    honest: Callable[..., None] = CheckpointReader.verify

    def verify(self: CheckpointReader, *args: Any) -> None:
        if not later.exists():
            later.touch()
            for name in ("iter_0000003", "iter_0000004"):
                (tmp_path / f"later-{name}").rename(folder / name)
            point_latest_to(folder / "iter_0000004")
            for name in ("iter_0000001", "iter_0000002"):
                shutil.rmtree(folder / name)
        honest(self, *args)

    monkeypatch.setattr(CheckpointReader, "verify", verify)
    return tmp_path / "run"


def _export(load: str, output: str) -> None:
    convert_checkpoint.main(convert_checkpoint.build_parser().parse_args(["--load", load, "--output", output]))


def _average(load: str, output: str) -> None:
    argv = ["--load", load, "--last", "2", "--output", output]
    average_checkpoints.main(average_checkpoints.build_parser().parse_args(argv))


def _evaluate(load: str, output: str) -> None:
    evaluate.ours(evaluate.build_parser().parse_args(["--load", load, "--input", "x"]))


def _generate(load: str, output: str) -> None:
    generate.load(generate.build_parser().parse_args(["--load", load]))


@pytest.mark.parametrize("tool", [_export, _average, _evaluate, _generate])
def test_the_newest_checkpoint_is_read_instead(
    tool: Callable[[str, str], None], run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool(str(run_dir), str(tmp_path / "out"))
    printed = capsys.readouterr().out
    (note,) = [line for line in printed.splitlines() if line.startswith("note: ") and "--keep-last" in line]
    assert "iter_000000" in note
    if tool is _average:
        origin = json.loads((tmp_path / "out/iter_0000000/checkpoint.json").read_text())["average_of"]
        assert [each["iteration"] for each in origin] == [3, 4]


def test_a_checkpoint_that_was_named_and_deleted(run_dir: Path, tmp_path: Path) -> None:
    checkpoint = find_checkpoint(str(run_dir))
    with pytest.raises(ValueError, match=f"{checkpoint} was deleted") as error:
        _export(str(checkpoint), str(tmp_path / "out"))
    assert "damaged" not in str(error.value) and not (tmp_path / "out").exists()
