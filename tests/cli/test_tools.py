"""The tools as users run them: what they write, and what they say about bad input."""

import gzip
import json
from pathlib import Path

import pytest

from megatron.data.indexed_dataset import IndexedDataset
from megatron.tokenizer import load_tokenizer
from tests.support import ROOT, command


def preprocess(prefix: Path, vocab_file: str, *inputs: Path, more: tuple[str, ...] = ()) -> str:
    argv = ["--input", *map(str, inputs), "--vocab-file", vocab_file, "--output-prefix", str(prefix), *more]
    done = command("python", "tools/preprocess_data.py", *argv)
    assert done.returncode == 0, done.stderr
    return done.stdout


def fails(*argv: str, code: int = 1) -> str:
    """Run a tool that must fail: one sentence on stderr, no traceback."""
    done = command("python", *argv)
    assert done.returncode == code, (done.returncode, done.stderr)
    lines = [
        line
        for line in done.stderr.replace("\r", "\n").splitlines()
        if line and "%|" not in line and "it/s" not in line
    ]
    lines = [line for line in lines if not line.startswith("tokenizing")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


def texts_of(prefix: Path, vocab_file: str) -> list[str]:
    indexed, tokenizer = IndexedDataset(f"{prefix}_text_document"), load_tokenizer(vocab_file)
    assert all(document[-1] == tokenizer.eod for document in (indexed[i] for i in range(len(indexed))))
    return [tokenizer.decode(indexed[i].tolist()) for i in range(len(indexed))]


def test_the_text_comes_back(tmp_path: Path, corpus: Path, vocab_file: str) -> None:
    said = preprocess(tmp_path / "a", vocab_file, corpus)
    expected = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    assert texts_of(tmp_path / "a", vocab_file) == expected
    assert said.startswith("40 documents, ")
    about = json.loads((tmp_path / "a_text_document.json").read_text())
    assert about["fingerprint"] == load_tokenizer(vocab_file).fingerprint
    assert about["documents"] == 40


@pytest.mark.parametrize("workers", ["0", "1", "3"])
def test_output_does_not_depend_on_workers(tmp_path: Path, vocab_file: str, sample_corpus: Path, workers: str) -> None:
    big = tmp_path / "big.jsonl"
    big.write_bytes(sample_corpus.read_bytes() * 20)  # 3 MB: several chunks
    preprocess(tmp_path / "a", vocab_file, big, more=("--workers", workers))
    preprocess(tmp_path / "b", vocab_file, big, more=("--workers", "2"))
    for ending in ("bin", "idx"):
        a, b = ((tmp_path / f"{name}_text_document.{ending}").read_bytes() for name in "ab")
        assert a == b


def test_gzip_folders_and_plain_text(tmp_path: Path, vocab_file: str, corpus: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(corpus.read_bytes()))
    (folder / "b.txt").write_text("first line\nsecond line\n\n\n\nanother document\n", encoding="utf-8")
    (folder / "ignored.md").write_text("# no")
    preprocess(tmp_path / "a", vocab_file, folder)
    expected = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    assert texts_of(tmp_path / "a", vocab_file) == [*expected, "first line\nsecond line", "another document"]


BAD = {
    "json": (b'{"text": "a"}\n{"text": \n{"text": "b"}\n', "line 2: not JSON"),
    "utf8": (b'{"text": "a"}\n\n{"text": "\xff"}\n{"text": "b"}\n', "line 3: not UTF-8 (byte 11 is 0xff)"),
    "key": (b'{"text": "a"}\n{"txt": "x"}\n{"text": "b"}\n', "line 2: no text under the key 'text'"),
    "kind": (b'{"text": "a"}\n[1]\n{"text": "b"}\n', "line 2: no text under the key 'text'"),
    "surrogate": (b'{"text": "a"}\n{"text": "\\ud800"}\n{"text": "b"}\n', "line 2: half of a surrogate pair"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("compress", [False, True])
def test_a_bad_line_is_named_or_skipped(tmp_path: Path, vocab_file: str, kind: str, compress: bool) -> None:
    content, message = BAD[kind]
    path = tmp_path / ("x.jsonl.gz" if compress else "x.jsonl")
    path.write_bytes(gzip.compress(content) if compress else content)
    out = tmp_path / "out"
    argv = [
        "tools/preprocess_data.py",
        "--input",
        str(path),
        "--vocab-file",
        vocab_file,
        "--output-prefix",
        str(out / "a"),
    ]
    said = fails(*argv, "--quiet")
    assert f"{path}, {message}" in said
    assert list(out.iterdir()) == []  # nothing half-written
    assert "1 bad and 0 empty left out" in preprocess(out / "a", vocab_file, path, more=("--on-error", "skip"))
    assert texts_of(out / "a", vocab_file) == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "no text in"), (b"\n\n", "no text in"), (b'{"text": ""}\n', "no text in")]
)
def test_an_empty_corpus_is_refused(tmp_path: Path, vocab_file: str, content: bytes, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    base = ["--input", str(path)]
    assert message in fails("tools/train_tokenizer.py", *base, "--output", str(tmp_path / "m"), "--quiet")
    said = fails(
        "tools/preprocess_data.py",
        *base,
        "--vocab-file",
        vocab_file,
        "--output-prefix",
        str(tmp_path / "out/a"),
        "--quiet",
    )
    assert message in said
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["tools/preprocess_data.py"], 2, "the following arguments are required"),
        (
            ["tools/train_tokenizer.py", "--input", "/no/file.jsonl", "--output", "x"],
            1,
            "there is no file /no/file.jsonl",
        ),
        (["tools/train_tokenizer.py", "--input", "README.md", "--output", "x"], 1, "README.md is none of .jsonl"),
        (["tools/train_tokenizer.py", "--input", "docs", "--output", "x"], 1, "the folder docs holds no"),
        (["tools/train_tokenizer.py", "--input", "corpus", "--output", "x", "--vocab-size", "9"], 1, "at least 300"),
        (["tools/generate.py", "--load", "/no/run"], 1, "/no/run holds no checkpoint"),
        (["tools/report.py", "--run-dir", "/no/run"], 1, "/no/run is not the folder of a run"),
    ],
)
def test_mistakes_are_one_sentence(argv: list[str], code: int, message: str) -> None:
    assert message in fails(*argv, code=code)


def test_damaged_gzip_is_named(tmp_path: Path, vocab_file: str, corpus: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(corpus.read_bytes())[:-20])
    said = fails("tools/train_tokenizer.py", "--input", str(path), "--output", str(tmp_path / "m"), "--quiet")
    assert "x.jsonl.gz" in said
    assert "near line 1: damaged compressed data" in said


@pytest.mark.parametrize("tool", sorted(p.name for p in (ROOT / "tools").glob("[a-z]*.py")))
def test_help_shows_examples(tool: str) -> None:
    done = command("python", f"tools/{tool}", "--help")
    assert done.returncode == 0
    assert "examples:" in done.stdout


def test_the_preprocessor_does_not_load_torch() -> None:
    """It starts a process a core; torch would cost each of them seconds and memory."""
    code = "import sys; sys.argv = ['x', '--help']; sys.path.insert(0, 'tools')\nimport preprocess_data\nassert 'torch' not in sys.modules"
    assert command("python", "-c", code).returncode == 0
