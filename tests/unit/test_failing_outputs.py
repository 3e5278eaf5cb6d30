"""A run continues if it cannot write a line of metrics, save a checkpoint or delete a checkpoint."""

import errno
import json
import resource
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing import RetryingSaver, TrainState, prune
from megatron.checkpointing.failures import SaveError
from megatron.training import metrics
from megatron.training.metrics import MetricsWriter
from tests.sentences import SENTENCES


def test_metrics_wait_for_a_disk_with_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writer, honest, full = MetricsWriter(str(tmp_path), 0, True), metrics.append_or_restore, [False]

    def append(path: Path, text: str) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        honest(path, text)

    monkeypatch.setattr(metrics, "append_or_restore", append)
    for iteration in range(5):
        full[0] = iteration in (1, 2)
        writer.write({"iteration": iteration})
    full[0] = True
    writer.write({"iteration": 5})
    writer.close()
    rows = [json.loads(line)["iteration"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [0, 1, 2, 3, 4]
    said = capsys.readouterr().out.splitlines()
    path = tmp_path / "metrics.jsonl"
    again = (
        f"note: {path} cannot be written (No space left on device); training continues, and the lines are kept "
        "in memory until the file can be written"
    )
    assert said[:3] == [again, f"note: {path} can be written again; it now has the 2 kept lines, too", again]
    assert said[-1] == f"note: the last 1 lines of {path} were not written"


def test_a_line_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    metrics.append_or_restore(tmp_path / "file", "one\n")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6, before[1]))  # only half of the second line fits in 6 bytes
    try:
        with pytest.raises(OSError, match=SENTENCES["no_space_left"]):
            metrics.append_or_restore(tmp_path / "file", "two\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    metrics.append_or_restore(tmp_path / "file", "three\n")
    assert (tmp_path / "file").read_text() == "one\nthree\n"


class _Saver:
    """A saver that fails while `full` is True, like one whose disk is full."""

    is_pending = is_writing = False

    def __init__(self) -> None:
        self.full, self.saved = False, list[int]()

    def save(self, state: TrainState, wait: bool = False) -> None:
        if self.full:
            raise SaveError(f"could not save there/iter_{state.iteration}: No space left on device")
        self.saved.append(state.iteration)


def test_a_failed_save_is_tried_again(capsys: pytest.CaptureFixture[str]) -> None:
    inner: Any = _Saver()
    saver = RetryingSaver(inner, 2)
    for iteration, full in enumerate([False, True, True, False, True, True]):
        inner.full = full
        saver.save(TrainState(iteration))
    assert inner.saved == [0, 3]
    notes = capsys.readouterr().out.splitlines()
    assert len(notes) == 4
    assert notes[0] == (
        "note: could not save there/iter_1: No space left on device; training continues, and the next save tries "
        "again (failed saves in a row: 1, tolerated: 2)"
    )
    with pytest.raises(SaveError, match="iter_6"):  # the third failure in a row, but only two are allowed
        saver.save(TrainState(6))
    with pytest.raises(SaveError, match="iter_7"):  # must_succeed=True raises at once, as no later save follows
        RetryingSaver(inner, 2).save(TrainState(7), must_succeed=True)


def test_an_old_checkpoint_that_cannot_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in (1, 2, 3):
        (tmp_path / f"iter_{n:07d}").mkdir()
    (tmp_path / "latest").write_text("iter_0000003\n")

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rmdir", refuse)
        (note, _) = prune(tmp_path, 1, None)
    remaining = tmp_path / "iter_0000001.old.tmp"
    assert note.startswith(f"the old checkpoint {remaining} could not be deleted (Permission denied: ")
    assert remaining.is_dir()
    assert (tmp_path / "iter_0000003").is_dir()


def test_a_report_that_cannot_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_tools.report import report

    def broken(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(report, "draw_losses", broken)
    monkeypatch.setattr(report, "unigram_baselines", lambda *_: {})
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 7}\n')
    (tmp_path / "config.json").write_text("{}")
    report.main(report.build_parser().parse_args(["--run-dir", str(tmp_path)]))
    said = capsys.readouterr()
    assert "iterations  7" in said.out
    assert said.err.startswith("report.py: loss.png ") and said.err.count("\n") == 1
    assert f"{tmp_path}: No space left on device" in said.err
    assert (tmp_path / "report.html").is_file()  # the page needs no drawing
    monkeypatch.setattr(report, "whole_page", broken)
    with pytest.raises(OSError):  # --output asks for the page
        report.main(report.build_parser().parse_args(["--run-dir", str(tmp_path), "--output", str(tmp_path / "x")]))
