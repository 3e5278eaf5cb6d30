"""Commands of tools/ print the right output, and refuse bad input with one sentence."""

import gzip
import json
import re
from pathlib import Path

import pytest

from megatron.data.indexed_dataset import IndexedDataset
from megatron.tokenizer import load_tokenizer
from tests.support import FULL, ROOT, command, covering


def preprocess(prefix: Path, vocab_file: str, *inputs: Path, more: tuple[str, ...] = ()) -> str:
    argv = ["--input", *map(str, inputs), "--vocab-file", vocab_file, "--output-prefix", str(prefix)]
    argv += ["--workers", "0", *more]  # a worker is a new interpreter
    done = command("python", "tools/preprocess_data.py", *argv)
    assert done.returncode == 0, done.stderr
    return done.stdout


def fails(*argv: str, code: int = 1) -> str:
    """Run a tool, check that it fails with one sentence on stderr and no traceback, and return the sentence."""
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


def test_output_does_not_depend_on_workers(tmp_path: Path, vocab_file: str, sample_corpus: Path) -> None:
    big = tmp_path / "big.jsonl"
    big.write_bytes(sample_corpus.read_bytes() * 20)  # 3 MB, which the tool reads in several chunks
    for workers in ("0", "1", "3"):
        preprocess(tmp_path / workers, vocab_file, big, more=("--workers", workers))
    for ending in ("bin", "idx"):
        made = {(tmp_path / f"{workers}_text_document.{ending}").read_bytes() for workers in ("0", "1", "3")}
        assert len(made) == 1


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
    "json": (
        b'{"text": "a"}\n{\n{"text": "b"}\n',
        "line 2: the record is not JSON (Expecting property name enclosed in double quotes at column 2); write each "
        "record on a line of its own",
    ),
    "utf8": (b'{"text": "a"}\n\n{"text": "\xff"}\n{"text": "b"}\n', "line 3: the text is not UTF-8 (byte 11 is 0xff)"),
    "key": (
        b'{"text": "a"}\n{"txt": "x"}\n{"text": "b"}\n',
        "line 2: the record has no text under the key 'text', but under txt: pass that as --json-key",
    ),
    "kind": (b'{"text": "a"}\n[1]\n{"text": "b"}\n', "line 2: the record is not a JSON object; write each record"),
    "surrogate": (
        b'{"text": "a"}\n{"text": "\\ud800"}\n{"text": "b"}\n',
        "line 2: the text contains half of a surrogate pair",
    ),
}


LINES = [(compress, kind) for compress in (False, True) for kind in BAD]


@pytest.mark.parametrize(
    ("compress", "kind"), covering(LINES, lambda line: not line[0] or line[1] == "utf8", several=True)
)
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
    assert list(out.iterdir()) == []  # no partial output
    assert "1 unreadable and 0 empty documents skipped" in preprocess(
        out / "a", vocab_file, path, more=("--on-error", "skip")
    )
    assert texts_of(out / "a", vocab_file) == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no text in"),
        pytest.param(b"\n\n", "no text in", marks=FULL),
        (b'{"text": ""}\n', "no text in"),
    ],
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


def test_a_corpus_of_unreadable_documents_is_not_called_empty(tmp_path: Path, vocab_file: str) -> None:
    """--on-error skip and a wrong --json-key leave no text; the advised --on-error stop then names the key."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"body": "a"}\n{"body": "b"}\n')
    train = ["tools/train_tokenizer.py", "--output", str(tmp_path / "m")]
    encode = ["tools/preprocess_data.py", "--vocab-file", vocab_file, "--output-prefix", str(tmp_path / "out/a")]
    for tool in (train, encode):
        said = fails(*tool, "--input", str(path), "--quiet", "--on-error", "skip")
        assert "2 unreadable" in said and "--on-error stop" in said
        assert "--json-key" in fails(*tool, "--input", str(path), "--quiet", "--on-error", "stop")


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["tools/preprocess_data.py"], 2, "the following arguments are required"),
        (
            ["tools/train_tokenizer.py", "--input", "/no/file.jsonl", "--output", "x"],
            1,
            "there is no file /no/file.jsonl",
        ),
        (
            ["tools/train_tokenizer.py", "--input", "README.md", "--output", "x"],
            1,
            "README.md is not of a supported type; supported are .jsonl",
        ),
        (["tools/train_tokenizer.py", "--input", "docs", "--output", "x"], 1, "docs gives no file"),
        (["tools/train_tokenizer.py", "--input", "corpus", "--output", "x", "--vocab-size", "9"], 1, "at least 300"),
        (["tools/generate.py", "--load", "/no/run"], 1, "/no/run holds no checkpoint"),
        (["tools/report.py", "--run-dir", "/no/run"], 1, "/no/run is not a run directory"),
    ],
)
def test_mistakes_are_one_sentence(argv: list[str], code: int, message: str) -> None:
    assert message in fails(*argv, code=code)


def test_damaged_gzip_is_named(tmp_path: Path, vocab_file: str, corpus: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(corpus.read_bytes())[:-20])
    said = fails("tools/train_tokenizer.py", "--input", str(path), "--output", str(tmp_path / "m"), "--quiet")
    assert "x.jsonl.gz" in said
    assert "near line 1: cannot read or decompress the file" in said


@pytest.mark.parametrize("tool", sorted(p.name for p in (ROOT / "tools").glob("[a-z]*.py")))
def test_help_shows_examples(tool: str) -> None:
    done = command("python", f"tools/{tool}", "--help")
    assert done.returncode == 0
    assert "examples:" in done.stdout


def test_the_preprocessor_does_not_load_torch() -> None:
    """preprocess_data.py does not import torch, which would cost each of its workers time and memory."""
    code = (
        "import sys; sys.argv = ['x', '--help']; import data_utils.preprocess_data\nassert 'torch' not in sys.modules"
    )
    assert command("python", "-c", code).returncode == 0


def test_several_keys_sentences_and_formats(tmp_path: Path, vocab_file: str) -> None:
    """A JSON array and a CSV of the same records give the same corpora: one per key, with one sequence per sentence."""
    records = [{"title": f"标题{i}", "text": f"第一句。第{i}句！\n尾"} for i in range(30)]
    (tmp_path / "a.json").write_text(json.dumps(records, ensure_ascii=False, indent=1))
    rows = "".join(f'{r["title"]},"{r["text"]}"\n' for r in records)
    (tmp_path / "a.csv").write_text("title,text\n" + rows)
    for name in ("json", "csv"):
        preprocess(
            tmp_path / name, vocab_file, tmp_path / f"a.{name}", more=("--keys", "title", "text", "--split-sentences")
        )
    tokenizer = load_tokenizer(vocab_file)
    for name in ("json", "csv"):
        titles = IndexedDataset(tmp_path / f"{name}_title_sentence")
        texts = IndexedDataset(tmp_path / f"{name}_text_sentence")
        assert (titles.num_documents, len(titles), texts.num_documents, len(texts)) == (30, 30, 30, 90)
        assert [tokenizer.decode(texts[i].tolist()) for i in range(3, 6)] == ["第一句。", "第1句！\n", "尾"]
        assert [int(texts[i][-1]) == tokenizer.eod for i in range(3, 6)] == [False, False, True]
        assert tokenizer.decode(titles[29].tolist()) == "标题29"


def test_a_key_whose_name_begins_like_another_pair(tmp_path: Path, vocab_file: str) -> None:
    """The sidecar of each corpus describes its own files only."""
    records = [{"q": f"问题{i}", "q_document": f"第{i}个长一些的文档"} for i in range(20)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    preprocess(tmp_path / "o", vocab_file, tmp_path / "a.jsonl", more=("--keys", "q", "q_document"))
    for key in ("q", "q_document"):
        prefix = tmp_path / f"o_{key}_document"
        sidecar = json.loads(prefix.with_suffix(".json").read_text())
        assert list(sidecar["sha256"]) == [prefix.name]
        assert sidecar["tokens"] == IndexedDataset(prefix).num_tokens


def test_weights_and_globs(tmp_path: Path, vocab_file: str) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": f"{name}{i}"}) + "\n" for i in range(400)))
    preprocess(tmp_path / "o", vocab_file, Path(f"{tmp_path}/a*.jsonl@2.25"), Path(f"{tmp_path}/b.jsonl"))
    texts = texts_of(tmp_path / "o", vocab_file)
    counts = [texts.count(f"a{i}") for i in range(400)]
    assert set(counts) == {2, 3}
    assert abs(counts.count(3) - 100) < 40
    assert [text for text in texts if text[0] == "b"] == [f"b{i}" for i in range(400)]
    assert "gives no file" in fails(
        "tools/preprocess_data.py", "--input", f"{tmp_path}/z*", "--vocab-file", vocab_file, "--output-prefix", "x"
    )


@pytest.mark.parametrize("objective", ["text", pytest.param("cpm-t5", marks=FULL)])
def test_a_killed_run_goes_on(tmp_path: Path, vocab_file: str, sample_corpus: Path, objective: str) -> None:
    """Preprocessing that is killed and resumed with other --workers writes the same files as without interruption."""
    big = tmp_path / "big.jsonl"
    big.write_bytes(sample_corpus.read_bytes() * 80)  # 13 MB, so that there is time to kill the tool
    preprocess(tmp_path / "a", vocab_file, big, more=("--objective", objective))
    argv = [
        "--input",
        str(big),
        "--vocab-file",
        vocab_file,
        "--output-prefix",
        str(tmp_path / "b"),
        "--objective",
        objective,
    ]
    code = (
        "import sys, os, signal, time\n"
        "import data_utils.preprocess_data as p\n"
        "p.JOURNAL_SECONDS = 0\n"
        "honest = p._Output.add\n"
        "def add(self, tokens):\n"
        "    honest(self, tokens)\n"
        "    add.left -= 1\n"
        "    if not add.left: os.kill(os.getpid(), signal.SIGKILL)\n"
        "add.left = int(sys.argv.pop(1)); p._Output.add = add\n"
        "p.run(p.main, p.build_parser(), sys.argv[1:])"
    )
    for chunks_more, workers in ((3, "0"), (4, "2"), (1, "0")):
        assert command("python", "-c", code, str(chunks_more), *argv, "--workers", workers, "--quiet").returncode == -9
        assert (tmp_path / "b.part.json").exists()
        assert not list(tmp_path.glob("b_*.idx"))
    said = fails(
        "tools/preprocess_data.py",
        *argv,
        "--quiet",
        "--no-append-eod" if objective == "text" else "--seed",
        *([] if objective == "text" else ["5"]),
    )
    assert "a run with other settings" in said
    done = command("python", "tools/preprocess_data.py", *argv, "--workers", "1")
    assert done.returncode == 0, done.stderr
    assert "resuming after" in done.stderr + done.stdout
    made = sorted(path.name for path in tmp_path.glob("b_*"))
    assert made == [path.name.replace("a_", "b_", 1) for path in sorted(tmp_path.glob("a_*"))]
    for name in made:
        ours, theirs = (tmp_path / name).read_bytes(), (tmp_path / name.replace("b_", "a_", 1)).read_bytes()
        assert ours.replace(b"b_text", b"a_text") == theirs


def test_a_chunk_without_documents(tmp_path: Path, vocab_file: str) -> None:
    """With --objective cpm-t5, a chunk of the input in which all lines lack the key adds no document to the corpus."""
    bad = "".join(json.dumps({"txt": "x" * 1000}) + "\n" for _ in range(1200))
    good = json.dumps({"text": "春眠不觉晓，处处闻啼鸟。" * 3}) + "\n"
    (tmp_path / "x.jsonl").write_text(bad + good)
    preprocess(tmp_path / "o", vocab_file, tmp_path / "x.jsonl", more=("--on-error", "skip", "--objective", "cpm-t5"))
    assert IndexedDataset(tmp_path / "o_text_document_context").num_documents == 1


def test_long_documents_are_refused(tmp_path: Path, vocab_file: str) -> None:
    (tmp_path / "x.txt").write_text("一" * 800_000)
    argv = [
        "--input",
        str(tmp_path / "x.txt"),
        "--vocab-file",
        vocab_file,
        "--output-prefix",
        str(tmp_path / "o"),
        "--quiet",
    ]
    assert "exceeds --max-document-mb (1048576 bytes)" in fails(
        "tools/preprocess_data.py", *argv, "--max-document-mb", "1"
    )
    assert not list(tmp_path.glob("o*"))


def test_inspecting(tmp_path: Path, vocab_file: str, corpus: Path) -> None:
    preprocess(tmp_path / "a", vocab_file, corpus)
    pair, tool = str(tmp_path / "a_text_document"), "tools/inspect_data.py"

    def says(*argv: str) -> str:
        done = command("python", tool, *argv)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert re.search(r"documents +40\b", says("info", pair))
    assert "checksums, tokenizer, ids below 3000" in says("verify", pair, "--vocab-file", vocab_file)
    assert "第3篇文章。\nDocument number 3. 词词词" in says("decode", pair, "3", "--vocab-file", vocab_file)
    assert "80 documents" in says("merge", pair, pair, "--output", f"{tmp_path}/m")
    assert "no problem found" in says("verify", f"{tmp_path}/m")
    says("split", f"{tmp_path}/m", "--split", "1,1")
    a, m, t, v = (IndexedDataset(p) for p in (pair, f"{tmp_path}/m", f"{tmp_path}/m_train", f"{tmp_path}/m_valid"))
    assert [m[i].tolist() for i in range(80)] == 2 * [a[i].tolist() for i in range(40)]
    assert [each[i].tolist() for each in (t, v) for i in range(40)] == [m[i].tolist() for i in range(80)]
    assert "documents 0 to 39, but no document 40" in fails(tool, "decode", pair, "40", "--vocab-file", vocab_file)
    assert "is one of the given pairs" in fails(tool, "merge", pair, "--output", pair)
    damaged = bytearray((tmp_path / "m.bin").read_bytes())
    damaged[100:102] = b"\xff\xff"
    (tmp_path / "m.bin").write_bytes(damaged)
    said = fails(tool, "verify", f"{tmp_path}/m")
    assert f"m.bin is damaged in bytes 0 to {len(damaged)}" in said
    assert "token id 65535 is outside the vocabulary of 3000" in said


def test_cleaning(tmp_path: Path) -> None:
    texts = [f"第{i}篇足够长的文章，讲的是数字{i * 7919}的故事。" for i in range(50)]
    bad = ["短", texts[3].replace("，", " "), "锟斤拷" * 20]
    lines = [json.dumps({"text": text}) for text in [*texts, *bad]]
    (tmp_path / "x.jsonl").write_text("\n".join([*lines, "not json"]) + "\n")
    argv = [
        "--input",
        str(tmp_path / "x.jsonl"),
        "--output",
        str(tmp_path / "o.jsonl"),
        "--dropped",
        str(tmp_path / "d.jsonl"),
    ]
    assert "line 54: the record is not JSON" in fails("tools/clean_corpus.py", *argv, "--quiet")
    assert not (tmp_path / "o.jsonl").exists()
    done = command("python", "tools/clean_corpus.py", *argv, "--quiet", "--on-error", "skip")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line)["text"] for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert sorted(found) == sorted(texts)
    assert found != texts
    report = json.loads((tmp_path / "o.jsonl.report.json").read_text())
    assert report["dropped"] == {"too short": 1, "exact duplicate": 1, "mojibake": 1, "unreadable": 1}
    assert report["read"] == report["kept"] + 4
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "d.jsonl").read_text().splitlines()]
    assert sorted(reasons) == ["exact duplicate", "mojibake", "too short", "unreadable"]


@pytest.mark.parametrize("kind", ["cpm", "cpm-vocab", "gpt2-bpe", "hf"])
def test_every_trainable_tokenizer_prepares_a_corpus(tmp_path: Path, sample_corpus: Path, kind: str) -> None:
    output = tmp_path / {"cpm": "t.model", "cpm-vocab": "vocab.txt", "gpt2-bpe": "bpe", "hf": "tokenizer.json"}[kind]
    argv = [
        "--input",
        str(sample_corpus),
        "--tokenizer-type",
        kind,
        "--vocab-size",
        "2500",
        "--output",
        str(output),
        "--quiet",
    ]
    done = command("python", "tools/train_tokenizer.py", *argv)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"2500 tokens -> {output}\n"
    preprocess(tmp_path / "a", str(output), sample_corpus)
    expected = [json.loads(line)["text"] for line in sample_corpus.read_text().splitlines()]
    assert texts_of(tmp_path / "a", str(output)) == expected
