"""Full disks: a tool writes its output at once or not at all, and messages name the file that is full."""

import errno
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from data_utils import clean_corpus
from megatron.atomic import copy_file
from megatron.checkpointing.relocation import copy_folder
from megatron.config.command_line import parse
from megatron.optim.resumed_lr import resolve_lr_schedule
from megatron.ranks.errors import RunError
from megatron.training import metrics
from megatron.training.metrics import MetricsWriter
from megatron.training.run_state import Run
from tests.support import on_ranks


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no file become larger than `size`, which acts as a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_copy_names_the_file_that_is_full(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 10_000)
    with largest_file(100), pytest.raises(OSError, match=str(tmp_path / "b")) as error:
        copy_file(tmp_path / "a", tmp_path / "b")
    assert error.value.filename == str(tmp_path / "b")
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "none")):
        copy_file(tmp_path / "none", tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_folders_are_copied_whole(tmp_path: Path) -> None:
    (tmp_path / "a" / "inner").mkdir(parents=True)
    (tmp_path / "a" / "x").write_text("1")
    (tmp_path / "a" / "inner" / "y").write_text("2")
    copy_folder(tmp_path / "a", tmp_path / "b")
    assert {path.name: path.read_text() for path in (tmp_path / "b").rglob("?") if path.is_file()} == {
        "x": "1",
        "y": "2",
    }


def test_the_full_output_of_clean_corpus_is_named(tmp_path: Path) -> None:
    """--dropped, which has space, is not named."""
    texts = [f"Sentence number {n} is written in plain English words, so it is kept. " * 5 for n in range(500)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, "x"]))
    argv = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl"), "--workers", "1"]
    argv += ["--dropped", str(tmp_path / "dropped.jsonl"), "--no-shuffle", "--quiet", "--max-repeated", "1"]
    args = clean_corpus.build_parser().parse_args(argv)
    with largest_file(50_000), pytest.raises(OSError, match=r"File too large") as error:
        clean_corpus.main(args)
    assert str(error.value.filename).endswith("out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_a_run_that_has_lost_rows_of_metrics_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = MetricsWriter(str(tmp_path), 0, True)
    writer.write({"iteration": 1})
    run: Any = SimpleNamespace(metrics=writer, locks=[], run_dir=tmp_path)
    Run.__exit__(run, None)
    monkeypatch.setattr(metrics, "append_or_restore", full)
    writer.write({"iteration": 2})
    with pytest.raises(RunError, match=r"metrics\.jsonl"):
        Run.__exit__(run, None)
    run.config, run.state = None, SimpleNamespace(iteration=2)
    Run.__exit__(run, ValueError, ValueError("x"))  # another error is not hidden


def _lose_rows() -> str:
    """End a run whose rank 0 could not write rows; return this rank's error."""
    lost = 3 if dist.get_rank() == 0 else 0
    run: Any = SimpleNamespace(metrics=SimpleNamespace(close=lambda *_: lost), locks=[], run_dir="runs/mine")
    with pytest.raises(RunError) as caught:
        Run.__exit__(run, None)
    return str(caught.value)


def test_all_ranks_learn_of_lost_rows() -> None:
    first, second = on_ranks(2, _lose_rows)
    assert "runs/mine/metrics.jsonl" in first and first == second


def test_the_error_of_a_run_is_its_last_row(tmp_path: Path) -> None:
    """Only metrics.jsonl gets the row, and a resumed run removes it."""
    others: list[int] = []
    other: Any = SimpleNamespace(name="x", write=lambda iteration, _: others.append(iteration), close=lambda: None)
    writer = MetricsWriter(str(tmp_path), 0, True)
    writer.forward_to([other])
    writer.write({"split": "train", "iteration": 4, "consumed_samples": 8, "consumed_tokens": 64, "lm_loss": 1.0})
    run: Any = SimpleNamespace(
        metrics=writer, locks=[], run_dir=tmp_path, config=None, state=SimpleNamespace(iteration=4)
    )
    Run.__exit__(run, RunError, RunError("NaN in layer 1"), None)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[1:] == [{"split": "end", "iteration": 4, "reason": "NaN in layer 1"}]
    assert others == [4]
    MetricsWriter(str(tmp_path), 4, True)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_note_has_no_equal_sides() -> None:
    flags = ["--lr-decay-style", "constant", "--warmup", "0"]
    saved, longer = (parse([*flags, "--train-iters", number]) for number in ("100", "200"))
    assert resolve_lr_schedule(longer, saved) == (longer, None)
    close = parse([*flags, "--train-iters", "100", "--lr", "1.00000001e-3"])
    note = resolve_lr_schedule(close, parse([*flags, "--train-iters", "100", "--lr", "1e-3"]))[1] or ""
    assert "0.00100000001" in note
    _, other = resolve_lr_schedule(parse(["--train-iters", "200"]), parse(["--train-iters", "100"]))
    assert "100" in (other or "") and "200" in (other or "")
