"""`tools/inspect_data.py when` and `which` agree on the documents of a run."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_utils import inspect_data
from data_utils.indexed_writer import IndexedDatasetBuilder
from megatron.config.command_line import parse
from megatron.data.indexed_dataset import IndexedDataset
from megatron.tokenizer import load_tokenizer
from tests.support import command, on_ranks

from .runs import Start, run_all

Tool = Callable[..., str]
BASE = "--batch-size 2 --gas 2 --precision fp64 --save-interval 1"


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two corpora; document d repeats a token id of its own, 40 + 100 * corpus + d."""
    folder, found = tmp_path_factory.mktemp("corpora"), {}
    for number, name in enumerate("ab"):
        found[name] = str(folder / name)
        with IndexedDatasetBuilder(found[name], np.uint16) as builder:
            for document in range(40):
                builder.add_document(np.full(17 + document, 40 + 100 * number + document))
    return found


def go(ranks: int, run_dir: Path, flags: str, vocab_file: str, model: str = "gpt2") -> None:
    on_ranks(ranks, run_all, [Start(model, run_dir, f"{BASE} {flags}")], None, vocab_file)


def test_each_use_of_a_document_is_one_of_an_iteration(
    tmp_path: Path, corpora: dict[str, str], vocab_file: str
) -> None:
    """`which` for each iteration and `when` for each document name the same samples, in a run resumed on two ranks."""
    data = f"--data-path {corpora['a']}"
    run = tmp_path / "run"
    go(1, run, f"{data} --train-iters 2", vocab_file)
    go(2, run, f"{data} --train-iters 6 --batch-size 1", vocab_file)
    _check_tool(run, corpora["a"], vocab_file)


def _check_tool(run: Path, prefix: str, vocab_file: str) -> None:
    seen: dict[int, set[tuple[int, int]]] = {}
    for iteration in range(1, 7):
        done = command("python", "tools/inspect_data.py", "which", "--iteration", str(iteration), "--run-dir", str(run))
        assert done.returncode == 0, done.stderr
        for line in done.stdout.splitlines()[1:]:
            sample, corpus, document, *_ = line.split()
            assert corpus == prefix and (int(sample) // 4) == iteration - 1
            seen.setdefault(int(document), set()).add((iteration, int(sample)))
    for document in (3, 15, 30):
        asked = ("when", "--document", str(document), "--run-dir", str(run))
        done = command("python", "tools/inspect_data.py", *asked)
        assert done.returncode == 0, done.stderr
        rows = [line.split() for line in done.stdout.splitlines()[1:-1]]
        assert {(int(row[0]), int(row[2])) for row in rows} == seen.get(document, set())
        assert {row[1] for row in rows} <= {"done"}


def test_the_tool_shows_text_and_refuses_what_the_run_lacks(
    tmp_path: Path, corpora: dict[str, str], vocab_file: str
) -> None:
    go(1, tmp_path / "run", f"--data-path {corpora['a']} --train-iters 1", vocab_file)
    tool = ("python", "tools/inspect_data.py")
    where = ("--run-dir", str(tmp_path / "run"))
    done = command(*tool, "which", "--iteration", "1", "--full", *where)
    document = int(done.stdout.splitlines()[1].split()[2])
    text = load_tokenizer(vocab_file).decode(IndexedDataset(corpora["a"])[document][:3].tolist())
    assert " ".join(text.split()) in done.stdout.splitlines()[1]
    for argv, said in {
        ("when", "--document", "40"): "document 40",
        ("when", "--document", "1", "--path", "b"): "--path 'b'",
        ("which", "--iteration", "2"): "iterations 1 to 1",
        ("which", "--iteration", "0"): "iterations 1 to 1",
    }.items():
        done = command(*tool, *argv, *where)
        assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr


@pytest.fixture
def tool(tmp_path: Path, corpora: dict[str, str], vocab_file: str, capsys: pytest.CaptureFixture[str]) -> Tool:
    """Function that returns what a command prints about a run that trains on a and validates on other corpora."""

    def said(flags: list[str], *words: str) -> str:
        data = ["--train-data-path", corpora["a"], "--valid-data-path", *flags]
        config = parse([*data, "--vocab-file", vocab_file, "--seq-length", "16", "--train-iters", "40"], {})
        (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
        args = inspect_data.build_parser().parse_args([*words, "--run-dir", str(tmp_path)])
        args.function(args)
        return capsys.readouterr().out

    return said


def test_the_only_training_corpus_needs_no_name(tool: Tool, corpora: dict[str, str]) -> None:
    named = tool([corpora["b"]], "when", "--document", "3", "--path", corpora["a"])
    assert tool([corpora["b"]], "when", "--document", "3") == named
    assert len(named.splitlines()) > 2


def test_a_sample_of_each_named_validation_set(tool: Tool, corpora: dict[str, str]) -> None:
    """Ids of a are below 140, those of b begin with 140."""
    sets = [f"web={corpora['a']}", f"books={corpora['b']}"]
    for name, ids in {"web": range(40, 80), "books": range(140, 180)}.items():
        lines = tool(sets, "sample", "1", "--part", "valid", "--set", name).splitlines()
        rows = [line.split() for line in lines if line.split()[0].isdigit()]
        assert len(rows) == 16 and all(int(row[1]) in ids for row in rows)
    for wrong, advice in (
        (["--part", "valid"], r"--set to one of \['web', 'books'\]"),
        (["--set", "web"], "leave --set out"),
    ):
        with pytest.raises(ValueError, match=advice):
            tool(sets, "sample", "1", *wrong)
