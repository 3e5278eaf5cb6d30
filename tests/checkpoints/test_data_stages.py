"""Runs with data stages, resumed at any point and in other layouts, and stages that --override-data begins."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from data_utils.indexed_writer import IndexedDatasetBuilder
from data_utils.run_data import load_config
from megatron.config.command_line import from_file
from megatron.config.data_stages import parse_stages
from megatron.data import corpus_paths
from tests.support import FULL, RankFailure, command, covering, on_ranks

from .runs import Start, losses_of, run_all

BASE = "--batch-size 2 --precision fp64 --save-interval 1"


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Three corpora, each with its own token ids."""
    folder, dice, found = tmp_path_factory.mktemp("corpora"), np.random.default_rng(1), {}
    for number, name in enumerate("abc"):
        found[name] = str(folder / name)
        with IndexedDatasetBuilder(found[name], np.uint16) as builder:
            for _ in range(40):
                builder.add_document(dice.integers(10 + 900 * number, 60 + 900 * number, 60))
    return found


def go(ranks: int, run_dir: Path, flags: str, vocab_file: str, model: str = "gpt2") -> None:
    on_ranks(ranks, run_all, [Start(model, run_dir, f"{BASE} {flags}")], None, vocab_file)


def shares(run_dir: Path) -> dict[str, dict[int, float]]:
    """Return corpus -> iteration -> share of the targets, from metrics.jsonl."""
    found: dict[str, dict[int, float]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["split"].startswith("train/"):
            found.setdefault(row["split"].removeprefix("train/"), {})[row["iteration"]] = row["target_share"]
    return found


@pytest.mark.parametrize("model", ["gpt2", pytest.param("t5-v1.1", marks=FULL)])
def test_a_run_resumed_in_other_layouts_equals_one_without_a_break(
    model: str, tmp_path: Path, corpora: dict[str, str], vocab_file: str
) -> None:
    """The stage changes within an iteration, in tokens; a corpus is added, another one leaves and comes back."""
    tokens = {"gpt2": 24, "t5-v1.1": 32 + 9}[model]
    begun = "--data-stages 0: 0.5 {a} 0.5 {b}; 5: 0.75 {a} 0.25 {c}".format(**corpora)
    whole = f"{begun}; {tokens * 14 - 3} tokens: 0.5 {corpora['b']} 0.5 {corpora['c']}"
    go(1, tmp_path / "whole", f"{whole} --gas 2 --train-iters 6", vocab_file, model)
    for ranks, flags in (
        (2, f"{begun} --train-iters 2"),
        (2, f"{begun} --train-iters 3 --gas 2 --pipe-parallel-size 2"),
        (2, f"{whole} --train-iters 4 --gas 2 --model-parallel-size 2"),
        (1, f"{whole} --train-iters 6 --gas 2"),
    ):
        go(ranks, tmp_path / "cut", flags, vocab_file, model)
    np.testing.assert_allclose(losses_of(tmp_path / "cut"), losses_of(tmp_path / "whole"), rtol=1e-10)
    found = shares(tmp_path / "whole")
    assert set(found["a"]) == {1, 2, 3, 4} and set(found["b"]) == {1, 4, 5, 6} and set(found["c"]) == {3, 4, 5, 6}


def test_losses_of_another_stage_are_no_spikes(tmp_path: Path, corpora: dict[str, str], vocab_file: str) -> None:
    """The loss jumps when new token ids appear, which the model has learned to expect nowhere."""
    stages = "--data-stages 0: {a}; 80: {c}".format(**corpora)
    flags = "--lr 2e-2 --num-layers 2 --train-iters 44 --save-interval 0 --log-interval 1"
    go(1, tmp_path, f"{stages} {flags}", vocab_file)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = losses_of(tmp_path)
    assert losses[40] > losses[39] + 1.0
    assert [row["spikes"] for row in rows if "spikes" in row] == []


def test_other_weights_begin_a_stage(tmp_path: Path, corpora: dict[str, str], vocab_file: str) -> None:
    """A stage that --override-data begins continues the counters of the corpora; the same command then resumes."""
    first, second = "--data-path 0.5 {a} 0.5 {b}", "--data-path 0.9 {a} 0.1 {c}"
    first, second = (each.format(**corpora) for each in (first, second))
    planned = "--data-stages 0: 0.5 {a} 0.5 {b}; 20: 0.9 {a} 0.1 {c}".format(**corpora)
    go(1, tmp_path / "planned", f"{planned} --train-iters 14", vocab_file)
    go(1, tmp_path / "run", f"{first} --train-iters 10", vocab_file)
    with pytest.raises(RankFailure, match=r"stage at 0 samples was 0.5 .*--override-data"):
        go(1, tmp_path / "run", f"{second} --train-iters 12", vocab_file)
    # The corpus of a stage that is over may have been made with another tokenizer.
    sidecar = Path(f"{corpora['b']}.json")
    sidecar.write_text('{"fingerprint": "0123"}')
    go(1, tmp_path / "run", f"{second} --train-iters 12 --override-data", vocab_file)
    sidecar.unlink()
    # config.json has the flags; tools get the stages from the checkpoint.
    saved = from_file(str(tmp_path / "run" / "config.json"))
    assert (saved.data.data_stages, " ".join(saved.data.data_path or ())) == (None, second.removeprefix("--data-path "))
    assert not saved.checkpoint.override_data
    stages = parse_stages(load_config(str(tmp_path / "run")).data.data_stages or ())
    assert stages == parse_stages([planned.removeprefix("--data-stages ")])
    go(2, tmp_path / "run", f"{second.replace('--data', '--batch-size 1 --data')} --train-iters 13", vocab_file)
    go(1, tmp_path / "run", f"{planned} --train-iters 14", vocab_file)
    np.testing.assert_allclose(losses_of(tmp_path / "run"), losses_of(tmp_path / "planned"), rtol=1e-10)


def test_the_future_may_change_and_the_past_may_not(tmp_path: Path, corpora: dict[str, str], vocab_file: str) -> None:
    def stages(text: str) -> str:
        return f"--data-stages {text}".format(**corpora)

    go(1, tmp_path, f"{stages('0: {a}; 4: 0.5 {a} 0.5 {b}; 9: {c}')} --train-iters 5", vocab_file)
    go(1, tmp_path, f"{stages('0: {a}; 4: 0.5 {a} 0.5 {b}; 9: {c}; 11: {b}')} --train-iters 6", vocab_file)
    for text, said in {
        "0: {a}; 4: 0.1 {a} 0.9 {b}; 9: {c}": "stage at 4 samples was 0.5 .*is now 0.1 ",
        "0: {a}; 6: 0.5 {a} 0.5 {b}; 9: {c}": "stage at 4 samples was ",
        "0: {a}; 4: 0.5 {a} 0.5 {b}": "stage at 9 samples is only in the checkpoint",
    }.items():
        with pytest.raises(RankFailure, match=f"{said}.*--override-data"):
            go(1, tmp_path, f"{stages(text)} --train-iters 7", vocab_file)


def test_a_stage_after_the_end_and_a_missing_corpus_are_refused(
    tmp_path: Path, corpora: dict[str, str], vocab_file: str
) -> None:
    late = "--data-stages 0: {a}; 100: {b}".format(**corpora)
    with pytest.raises(RankFailure, match=r"stage at sample 100 .*--train-iters"):
        go(1, tmp_path / "late", f"{late} --train-iters 3", vocab_file)
    with pytest.raises(RankFailure, match="nowhere.idx"):
        go(1, tmp_path / "missing", f"--data-stages 0: {corpora['a']}; 4: nowhere --train-iters 3", vocab_file)


def test_the_tool_shows_what_each_corpus_gives(tmp_path: Path, corpora: dict[str, str], vocab_file: str) -> None:
    """A corpus has 2,400 tokens, so an epoch has 99 samples of 24 tokens; --split 1 trains on all documents."""
    plan = "0: 0.75 {a} 0.25 {b}; 100: {a}; 150 : 0.5 {b} 0.5 {c}".format(**corpora)
    flags = ["--data-stages", plan, "--vocab-file", vocab_file, "--seq-length", "24", "--split", "1"]
    png = tmp_path / "stages.png"
    done = command("python", "tools/inspect_data.py", "stages", "--samples", "250", "--png", str(png), "--", *flags)
    assert done.returncode == 0, done.stderr
    rows = [line.replace(",", "").split() for line in done.stdout.splitlines()[1:-1]]
    found = [(*row[:-4], row[-4], int(row[-3]), int(row[-2]), float(row[-1])) for row in rows]
    expected = [
        ("0", "to", "99", "a", 75), ("0", "to", "99", "b", 25), ("100", "to", "149", "a", 50),
        ("150", "to", "249", "b", 50), ("150", "to", "249", "c", 50), ("all", "a", 125), ("all", "b", 75),
        ("all", "c", 50),
    ]  # fmt: skip
    read = {"a": [75, 125, 125], "b": [25, 75, 75], "c": [50, 50]}
    for row, wanted in zip(found, expected, strict=True):
        *names, samples = wanted
        assert row == (*names, samples, 24 * samples, pytest.approx(read[names[-1]].pop(0) / 99, abs=1e-3))
    assert png.stat().st_size > 1000


@pytest.mark.parametrize("breaks", covering([5, 20], [5].__contains__))
def test_breaks_at_random_change_nothing(breaks: int, tmp_path: Path, corpora: dict[str, str], vocab_file: str) -> None:
    """Stages that a run reaches later are added at a break; every break also changes the layout of the two ranks."""
    dice, last = random.Random(breaks), 5 + 2 * breaks
    layouts = ["--gas 1", "--gas 2 --pipe-parallel-size 2", "--gas 2 --model-parallel-size 2"]
    plan = [
        (begin, [(dice.choice(["0.2", "0.7", "1"]), corpora[name]) for name in dice.sample("abc", dice.randint(1, 3))])
        for begin in (0, *sorted(dice.sample(range(1, 4 * last), 5)))
    ]

    def flags(end: int, layout: str) -> str:
        stages = [f"{n}: {' '.join(f'{w} {p}' for w, p in blend)}" for n, blend in plan if n < 4 * end]
        return f"{BASE} --save-interval {end} --train-iters {end} {layout} --data-stages '{'; '.join(stages)}'"

    ends = [*sorted(dice.sample(range(1, last), breaks)), last]
    cut = [Start("gpt2", tmp_path / "cut", flags(end, layouts[i % 3])) for i, end in enumerate(ends)]
    on_ranks(2, run_all, [*cut, Start("gpt2", tmp_path / "whole", flags(last, layouts[0]))], None, vocab_file)
    np.testing.assert_allclose(losses_of(tmp_path / "cut"), losses_of(tmp_path / "whole"), rtol=1e-9)
    states = [
        json.loads((tmp_path / name / "checkpoints" / f"iter_{last:07d}" / "checkpoint.json").read_text())["state"]
        for name in ("cut", "whole")
    ]
    assert states[0] == states[1], "the hash of the consumed samples and their order"
    found, expected = shares(tmp_path / "cut"), shares(tmp_path / "whole")
    assert found.keys() == expected.keys()
    for name, each in expected.items():  # a start whose stages have only one corpus logs no rows of corpora
        assert found[name] == pytest.approx({i: share for i, share in each.items() if i in found[name]})
        assert all(share == 1 for i, share in each.items() if i not in found[name])


def test_another_spelling_of_a_path_is_the_same_corpus(
    tmp_path: Path, corpora: dict[str, str], vocab_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(corpora["a"]).parent
    monkeypatch.chdir(folder)
    for copied in (".bin", ".idx"):
        shutil.copy(f"a{copied}", tmp_path / f"copy{copied}")
    go(1, tmp_path / "whole", f"--data-path {corpora['a']} --train-iters 4", vocab_file)
    for end, path in enumerate(("a", "./a", str(folder / "a"), str(tmp_path / "copy")), start=1):
        go(1, tmp_path / "run", f"--data-path {path} --override-data --train-iters {end}", vocab_file)
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "whole")


def test_changed_content_of_a_later_stage_is_refused(tmp_path: Path, corpora: dict[str, str], vocab_file: str) -> None:
    for name in "ab":
        for ending in (".bin", ".idx"):
            shutil.copy(f"{corpora[name]}{ending}", tmp_path / f"{name}{ending}")
    stages = f"--data-stages 0: {tmp_path}/a; 3: {tmp_path}/b"
    go(1, tmp_path / "run", f"{stages} --train-iters 3", vocab_file)
    tokens = np.memmap(tmp_path / "b.bin", np.uint16, "r+")
    tokens[:] += 1
    tokens.flush()
    with pytest.raises(RankFailure, match="6 samples .*--override-data"):
        go(1, tmp_path / "run", f"{stages} --train-iters 4", vocab_file)


def accept_a_corpus_twice(start: Start, vocab_file: str) -> None:
    """Run `start` as earlier versions did, which did not refuse a corpus that is twice in a blend."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_paths, "_parse_distinct", corpus_paths.parse_blend)
        run_all([start], None, vocab_file)


def test_a_blend_with_a_corpus_twice_can_be_replaced(tmp_path: Path, corpora: dict[str, str], vocab_file: str) -> None:
    """Earlier versions accepted it. It cannot be continued as stages: a note says that samples may be repeated."""
    twice = "--data-path 0.3 {a} 0.3 {b} 0.4 {a}".format(**corpora)
    start = Start("gpt2", tmp_path, f"{BASE} {twice} --train-iters 2")
    on_ranks(1, accept_a_corpus_twice, start, vocab_file)
    with pytest.raises(RankFailure, match=f"{corpora['a']} twice"):
        go(1, tmp_path, f"{twice} --train-iters 3", vocab_file)
    go(1, tmp_path, f"--data-path {corpora['b']} --override-data --train-iters 3", vocab_file)
    assert len(losses_of(tmp_path)) == 3
