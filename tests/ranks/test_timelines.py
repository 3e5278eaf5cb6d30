"""--trace on several ranks does not change losses and writes a timeline for each rank and a merged one."""

import json
from pathlib import Path

import pytest

from tests.checkpoints.runs import Start, run_all
from tests.support import losses, on_ranks, train_gpt2

SIZES = [
    "--num-layers",
    "2",
    "--hidden-size",
    "16",
    "--num-attention-heads",
    "2",
    "--seq-length",
    "16",
    "--batch-size",
    "1",
    "--gas",
    "2",
    "--eval-iters",
    "0",
    "--save-interval",
    "0",
    "--log-interval",
    "1",
    "--pipe-parallel-size",
    "2",
    "--precision",
    "fp32",
]


@pytest.fixture
def flags(tiny_data: str, vocab_file: str) -> list[str]:
    return [*SIZES, "--data-path", tiny_data, "--vocab-file", vocab_file]


def test_every_rank_is_in_the_timeline_of_all(tmp_path: Path, flags: list[str]) -> None:
    """The merged timeline has the events of every rank, and ignores files of an earlier start with more ranks."""
    folder = tmp_path / "traced" / "trace"
    folder.mkdir(parents=True)
    (folder / "rank_00007.json").write_text("no timeline")
    traced = train_gpt2(2, tmp_path / "traced", *flags, "--train-iters", "4", "--trace", "--trace-iterations", "2-3")
    assert losses(traced) == losses(train_gpt2(2, tmp_path / "plain", *flags, "--train-iters", "4"))
    assert sorted(path.name for path in folder.glob("rank_*")) == ["rank_00000.json", "rank_00001.json"]
    events = json.loads((folder / "merged.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1}
    assert {event["args"]["iteration"] for event in spans} == {2, 3}
    passes = [event for event in spans if event["cat"] == "pass"]
    assert len(passes) == 2 * 2 * 2 * 2  # 2 iterations x 2 stages x 2 micro-batches x (forward, backward)
    assert {event["ph"] for event in events} >= {"s", "f"}  # start and finish of the arrows that show messages


def test_a_timeline_that_cannot_be_written_ends_no_run(tmp_path: Path, flags: list[str]) -> None:
    (tmp_path / "trace").write_text("a file where the folder would be")
    rows = train_gpt2(2, tmp_path, *flags, "--train-iters", "2", "--trace")
    assert len(losses(rows)) == 2
    assert (tmp_path / "checkpoints" / "iter_0000002").is_dir()


def test_starts_that_record_no_iteration_keep_the_files_of_an_earlier_start(
    tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    """The second start trains iterations 4 and 5, and the third none; --trace and --profile select 2 and 3."""
    recorded = "--trace --trace-iterations 2-3 --profile --profile-iterations 2-3"
    flags = f"--num-layers 1 --precision fp32 --batch-size 2 --train-iters 5 {recorded}"
    starts = [Start("gpt2", tmp_path, f"{flags} {more}") for more in ("--exit-interval 3", "", "")]
    on_ranks(1, run_all, starts, tiny_data, vocab_file)
    for name in ("rank_00000.json", "merged.json"):
        events = json.loads((tmp_path / "trace" / name).read_text())["traceEvents"]
        assert {event["args"]["iteration"] for event in events if event["ph"] == "X"} == {2, 3}, name
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["torch_00000.json.gz"]
