"""Tools that read beside a run that deletes old checkpoints: they read the newest one again, or say what happened."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing import CheckpointReader, find_checkpoint
from megatron.checkpointing.files import point_latest_to
from megatron_tools.convert import average_checkpoints, average_flags, convert_checkpoint, convert_flags
from megatron_tools.write import evaluate, evaluate_flags, generate, generate_flags
from tests.checkpoints.runs import Start, make, run_all
from tests.support import RankFailure, on_ranks


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_data: str, vocab_file: str) -> Path:
    path = tmp_path_factory.mktemp("runs") / "gpt2"
    flags = "--num-layers 2 --batch-size 2 --train-iters 4 --save-interval 1 --precision fp32"
    on_ranks(1, run_all, [Start("gpt2", path, flags)], tiny_data, vocab_file)
    return path


@pytest.fixture
def run_dir(made: Path, tmp_path: Path) -> Path:
    """A run whose newest checkpoint is its second, before `go_on`."""
    shutil.copytree(made, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    for name in ("iter_0000003", "iter_0000004"):
        (folder / name).rename(tmp_path / f"later-{name}")
    point_latest_to(folder / "iter_0000002")
    return tmp_path / "run"


def go_on(run_dir: Path) -> None:
    """Let the run save its third and fourth checkpoint, and delete the older ones, when one of them is verified."""
    folder = run_dir / "checkpoints"
    honest: Callable[..., None] = CheckpointReader.verify

    def verify(self: CheckpointReader, *args: Any) -> None:
        if (folder / "iter_0000002").exists():
            for name in ("iter_0000003", "iter_0000004"):
                (run_dir.parent / f"later-{name}").rename(folder / name)
            point_latest_to(folder / "iter_0000004")
            for name in ("iter_0000001", "iter_0000002"):
                shutil.rmtree(folder / name)
        honest(self, *args)

    CheckpointReader.verify = verify  # type: ignore[method-assign]


@pytest.fixture
def going_on(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(CheckpointReader, "verify", CheckpointReader.verify)  # restored at the end
    go_on(run_dir)
    return run_dir


def _export(load: str, output: str) -> None:
    convert_checkpoint.main(convert_flags.build_parser().parse_args(["--load", load, "--output", output]))


def _average(load: str, output: str) -> None:
    argv = ["--load", load, "--last", "2", "--output", output]
    average_checkpoints.main(average_flags.build_parser().parse_args(argv))


def _evaluate(load: str, output: str) -> None:
    evaluate.load_subject(evaluate_flags.build_parser().parse_args(["--load", load, "--input", "x"]))


def _generate(load: str, output: str) -> None:
    generate.load_writer(generate_flags.build_parser().parse_args(["--load", load]))


@pytest.mark.parametrize("tool", [_export, _average, _evaluate, _generate])
def test_the_newest_checkpoint_is_read_instead(
    tool: Callable[[str, str], None], going_on: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool(str(going_on), str(tmp_path / "out"))
    printed = capsys.readouterr().out
    (note,) = [line for line in printed.splitlines() if line.startswith("note: ") and "--keep-last" in line]
    assert "iter_000000" in note
    if tool is _average:
        origin = json.loads((tmp_path / "out/iter_0000000/checkpoint.json").read_text())["average_of"]
        assert [each["iteration"] for each in origin] == [3, 4]


def test_a_checkpoint_that_was_named_and_deleted(going_on: Path, tmp_path: Path) -> None:
    checkpoint = find_checkpoint(str(going_on))
    with pytest.raises(ValueError, match=f"{checkpoint} was deleted") as error:
        _export(str(checkpoint), str(tmp_path / "out"))
    assert "damaged" not in str(error.value) and not (tmp_path / "out").exists()


def _start_from(load: Path, run_dir: Path, tiny_data: str, vocab_file: str) -> None:
    go_on(run_dir)
    folder = run_dir.parent / "new"
    flags = f"--num-layers 2 --batch-size 2 --train-iters 4 --precision fp32 --load {load}"
    with make(Start("gpt2", folder, flags), tiny_data, vocab_file):
        pass


@pytest.mark.parametrize("named", ["run", "checkpoint"])
def test_a_run_that_starts_from_a_checkpoint_which_is_deleted(
    named: str, run_dir: Path, tiny_data: str, vocab_file: str
) -> None:
    """Its model and data were set up for this checkpoint, so it ends with one sentence; the next start succeeds."""
    load = run_dir if named == "run" else find_checkpoint(str(run_dir))
    with pytest.raises(RankFailure, match="iter_0000002 was deleted .*--keep-last"):
        on_ranks(1, _start_from, load, run_dir, tiny_data, vocab_file)
    if named == "run":
        on_ranks(1, _start_from, load, run_dir, tiny_data, vocab_file)
