"""Input files are split into documents. No document is lost or read twice, and unreadable input is reported."""

import bz2
import csv
import errno
import gzip
import importlib
import io
import json
import lzma
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_utils import clean_corpus
from data_utils.chat_templates import messages_of
from data_utils.documents import chunks, documents, texts
from data_utils.files import Source, find_files
from data_utils.streams import BadLine, InputError
from tests.sentences import SENTENCES
from tests.support import ROOT

LARGEST = 4000


def read(path: Path, size: int = 256, largest: int = LARGEST, encoding: str = "utf-8") -> tuple[list[str], list[str]]:
    """Return the texts of a file, and the messages about its bad documents; the path is cut from the messages."""
    found = [
        d for c in chunks(Source(str(path), encoding=encoding), size, largest) for d in documents(c, largest=largest)
    ]
    bad = [str(each).removeprefix(str(path) + ", ") for each in found if isinstance(each, BadLine)]
    return [each[0] for each in found if not isinstance(each, BadLine)], bad


@pytest.mark.parametrize("blank", ["", " ", "\t", "\u3000", "\u00a0 ", " \u3000\n\n "])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_blank_line_is_a_blank_line(tmp_path: Path, end: str, blank: str) -> None:
    """In a text file, blank lines separate documents, even lines of full-width spaces; indentation is not stripped."""
    expected = [f"\u3000\u3000第{i}篇，\n" + "  第二行\n" * (i % 5) + "完" for i in range(848)]
    content = (f"\n{blank}\n".join([blank, *expected, blank])).replace("\n", end).encode()
    for name, raw in (("x.txt", content), ("x.txt.gz", gzip.compress(content))):
        (tmp_path / name).write_bytes(raw)
        for size in (1 << 20, 100):
            assert read(tmp_path / name, size) == (expected, [])


def test_an_input_that_shrinks_ends_the_reading(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "abc"}\n' * 1000)
    cut = chunks(Source(str(path)), 256)
    first = next(cut)
    path.write_text('{"text": "abc"}\n')
    with pytest.raises(InputError, match=SENTENCES["became_shorter_while_it_was_read"]):
        list(cut)
    with pytest.raises(InputError, match=SENTENCES["became_shorter_while_it_was_read"]):
        first.read()


LONG = "long, long text. " * 1000


def as_csv(rows: list[str]) -> str:
    file = io.StringIO()
    csv.writer(file).writerows([["n", "text"], *([i, row] for i, row in enumerate(rows))])
    return file.getvalue()


FORMATS: dict[str, Callable[[list[str]], str]] = {
    ".jsonl": lambda rows: "".join(json.dumps({"text": row}) + "\n" for row in rows),
    ".json": lambda rows: json.dumps([{"text": row} for row in rows], indent=1),
    ".csv": as_csv,
    ".txt": lambda rows: "\n\n".join(rows),
}


@pytest.mark.parametrize("ending", FORMATS)
@pytest.mark.parametrize("at", [0, 7, 29])
def test_a_document_that_is_too_long_is_one_bad_document(tmp_path: Path, ending: str, at: int) -> None:
    rows = [f"row {i},\n“second” line" for i in range(30)]
    rows[at] = LONG
    content = FORMATS[ending](rows)
    line = content[: content.index(LONG)].count("\n") + 1
    for name, raw in ((f"x{ending}", content.encode()), (f"x{ending}.gz", gzip.compress(content.encode()))):
        (tmp_path / name).write_bytes(raw)
        for size in (256, 1 << 20):
            found, bad = read(tmp_path / name, size)
            assert found == rows[:at] + rows[at + 1 :]
            assert len(bad) == 1
            assert bad[0].startswith(
                f"line {line - (ending == '.json')}: the document exceeds --max-document-mb (4000 bytes)"
            )
            assert read(tmp_path / name, size, 1 << 20) == (rows, [])


BAD_ITEMS = {
    "a missing value": '{"text": }',
    "an open quote": '{"text": "abc}',
    "an open bracket": '{"text": ["abc", {"x": "}"}',
    "a stray word": "nonsense",
    "a bad escape": r'{"text": "\x"}',
    "an object in it": '{"deep": [{"text": "not this"}, 2], "text": oops}',
}


@pytest.mark.parametrize("kind", BAD_ITEMS)
def test_a_bad_item_of_an_array_is_one_bad_document(tmp_path: Path, kind: str) -> None:
    items = [json.dumps({"text": f"t{i}", "more": [{"a": "]"}, {}]}) for i in range(12)]
    items[5] = BAD_ITEMS[kind]
    (tmp_path / "x.json").write_text("[" + ",\n".join(items) + "]\n")
    found, bad = read(tmp_path / "x.json")
    expected = [f"t{i}" for i in range(12) if i != 5]
    assert found == (expected[:5] + expected[-6:] if kind != "an open bracket" else expected[:5])
    assert bad[0].startswith("line 6: the record is not JSON (")
    assert kind == "an open bracket" or len(bad) == 1


def test_what_stands_in_no_array_is_said(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('[{"text": "a"},\n{"text": "b"}]\n[{"text": "c"}]')
    assert read(path) == (["a", "b"], ["line 3: text after the end of the array is skipped"])
    path.write_text('[{"text": "a"},\n{"text": "b"}')
    assert read(path) == (["a", "b"], ["line 2: the array is not closed: a ] is missing"])
    path.write_bytes(b'[{"text": "a"},\n{"text": "\xff"}]')
    assert read(path) == (["a"], ["line 2: the text is not UTF-8 (byte 11 is 0xff)"])


def test_a_bad_row_is_one_bad_document(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(b'\xef\xbb\xbfn,text\n\n1,a\n2,"b\n\n"\n3,"c"d\n4,e,f\n5\n6,\xff\n7,g\n8,"h')
    found, bad = read(path)
    assert found == ["a", "b\n\n", "g"]
    assert [each.split(":")[0] for each in bad] == ["line 7", "line 8", "line 9", "line 10", "line 12"]
    assert "3 fields" in bad[1] and "the header has 2" in bad[1]
    assert "not UTF-8" in bad[3]


def test_lines_are_counted_once(tmp_path: Path) -> None:
    """Bad lines are reported with their line numbers. Reading takes linear time even if every second line is bad."""
    path = tmp_path / "x.jsonl"
    path.write_text(('{"text": "good"}\n' + "x" * 40 + "\n") * 30_000)
    begin = time.process_time()
    lines = [d.line for c in chunks(Source(str(path))) for d in documents(c) if isinstance(d, BadLine)]
    assert lines == list(range(2, 60_001, 2))
    assert time.process_time() - begin < 20


def test_folders(tmp_path: Path) -> None:
    """Text files of a folder are read in sorted order, hidden files are skipped, and other file types are reported."""
    line = b'{"text": "%s"}\n'
    for name, content in {
        "a.ndjson": line % b"a",
        "b.JSONL": line % b"b",
        "c.jsonl.bz2": bz2.compress(line % b"c"),
        "d.TXT.GZ": gzip.compress(b"d"),
        ".hidden.jsonl": line % b"no",
        ".git/x.jsonl": line % b"no",
        "e/f.jsonl": line % b"f",
        "z.md": b"",
        "y.doc": b"",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    said: list[str] = []
    found = find_files([str(tmp_path)], say=said.append)
    assert list(texts(found)) == ["a", "b", "c", "d", "f"]
    assert len(said) == 1
    assert "2 of 7 files" in said[0]
    assert "z.md" in said[0]
    find_files([f"{tmp_path}/*"], say=said.append)
    assert "2 of 7 files" in said[1]


def test_the_recipe_of_a_job_for_each_shard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of separately cleaned shards can be cleaned again as one corpus.

    That folder also contains the reports of the first cleaning, which are not read as text.
    """

    def clean(source: Path, output: Path, *more: str) -> None:
        argv = ["--input", str(source), "--output", str(output), "--workers", "0", "--quiet", *more]
        clean_corpus.main(clean_corpus.build_parser().parse_args(argv))

    for name, shard in (("part-0", "zero"), ("part-1", "one")):
        lines = [json.dumps({"text": f"Document {i} of shard {shard} tells a story."}) for i in range(9)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        clean(tmp_path / f"{name}.jsonl", tmp_path / f"cleaned/{name}.jsonl", "--no-shuffle")
    capsys.readouterr()
    clean(tmp_path / "cleaned", tmp_path / "clean.jsonl")
    assert "2 reports of tools/clean_corpus.py" in capsys.readouterr().err
    assert len(list(texts(find_files([str(tmp_path / "clean.jsonl")])))) == 18
    report = tmp_path / "cleaned/part-0.jsonl.report.json"
    assert [each.path for each in find_files([str(report)])] == [str(report)], "by its name it is read"
    (tmp_path / "cleaned/annual.report.json").write_text('{"text": "a"}')
    said: list[str] = []
    assert len(find_files([f"{tmp_path}/cleaned/*"], say=said.append)) == 3 and "2 reports" in said[0]


def test_all_tools_leave_out_what_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tools fail on an unreadable or overlong document and name the file; --on-error skip skips and counts it."""
    dice = random.Random(1)
    lines = [json.dumps({"text": "".join(dice.choices("abcdefghij 春眠不觉晓", k=60))}) for _ in range(300)]
    lines[100:100] = ["no JSON", json.dumps({"text": "长" * 9000})]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    for name, output, says in (
        ("train_tokenizer", "x.model", "2 unreadable documents skipped"),
        ("clean_corpus", "clean.jsonl", "dropped: unreadable 2"),
    ):
        tool = importlib.import_module(f"data_utils.{name}")
        argv = [
            "--input",
            str(tmp_path / "x.jsonl"),
            "--output",
            str(tmp_path / output),
            "--max-document-mb",
            "0.01",
            "--quiet",
        ]
        argv += ["--vocab-size", "340"] if name == "train_tokenizer" else ["--workers", "0"]
        with pytest.raises(ValueError, match=r"x\.jsonl.*--on-error"):
            tool.main(tool.build_parser().parse_args(argv))
        tool.main(tool.build_parser().parse_args([*argv, "--on-error", "skip"]))
        assert says in " ".join(capsys.readouterr().out.split())


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [f"第{i}行\n{'x' * i}" for i in range(700)]
    columns = {"n": list(range(700)), "text": [None if i == 500 else row for i, row in enumerate(rows)]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "x.parquet")
    found, bad = read(tmp_path / "x.parquet")
    assert found == rows[:500] + rows[501:]
    assert bad == ["row 501: the record has no text under the key 'text'"]
    (tmp_path / "x.parquet").write_bytes((tmp_path / "x.parquet").read_bytes()[:-30])
    with pytest.raises(InputError, match="damaged parquet"):
        read(tmp_path / "x.parquet")


def test_columns_of_parquet_as_the_hub_has_them(tmp_path: Path) -> None:
    """Parquet text is read from every Arrow string type, and conversations from lists of structs.

    The message about a missing text column lists the columns and their types.
    """
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts_ = [f"第{i % 7}行" for i in range(40)]
    turns = [[{"role": "user", "content": t}, {"role": "assistant", "content": t[::-1]}] for t in texts_]
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    chats: dict[str, Any] = {
        "list": pa.list_(message),
        "large_list": pa.large_list(message),
        "roles": pa.list_(pa.struct([("role", pa.dictionary(pa.int8(), pa.string())), ("content", pa.string())])),
        "more": pa.list_(pa.struct([*message, ("weight", pa.float32()), ("tags", pa.list_(pa.string()))])),
    }
    for name, kind_ in chats.items():
        ids = pa.array(range(40))
        table = pa.table({"messages": pa.array(turns, kind_), "id": ids, "embedding": pa.array([[0.5]] * 40)})
        parquet.write_table(table, tmp_path / "x.parquet")
        source = Source(str(tmp_path / "x.parquet"))
        found = [d for c in chunks(source) for d in documents(c, messages_of)]
        assert found == [messages_of({"messages": each}) for each in turns], name
        (bad,) = {str(b).partition(": ")[2] for c in chunks(source) for b in documents(c, ("embedding",))}
        assert "embedding (list<element: double>)" in bad or "embedding (list<item: double>)" in bad
    for kind_ in (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())):
        parquet.write_table(pa.table({"text": pa.array(texts_, kind_)}), tmp_path / "x.parquet")
        assert read(tmp_path / "x.parquet") == (texts_, []), kind_
    parquet.write_table(pa.table({"text": [b"raw"], "at": pa.array([0], pa.timestamp("us"))}), tmp_path / "x.parquet")
    _, (bad,) = read(tmp_path / "x.parquet")
    assert "text (binary)" in bad
    ((bad,),) = ([str(b) for b in documents(c, messages_of)] for c in chunks(Source(str(tmp_path / "x.parquet"))))
    assert "text (binary), at (timestamp[us])" in bad


CHINESE = [f"第{i}篇：春眠不觉晓，处处闻啼鸟。\n夜来风雨声，花落知多少。𠮷" for i in range(60)]


@pytest.mark.parametrize("encoding", ["gb18030", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("ending", FORMATS)
def test_other_encodings(tmp_path: Path, ending: str, encoding: str) -> None:
    content = FORMATS[ending](CHINESE)
    (tmp_path / f"x{ending}").write_bytes(content.encode(encoding))
    assert read(tmp_path / f"x{ending}", encoding=encoding) == (CHINESE, [])
    (tmp_path / f"x{ending}.gz").write_bytes(gzip.compress(content.encode(encoding)))
    assert read(tmp_path / f"x{ending}.gz", encoding=encoding) == (CHINESE, [])


def test_the_wrong_encoding_is_said(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    for encoding in ("gb18030", "utf-16", "utf-16-le"):
        path.write_bytes("\n\n".join(CHINESE).encode(encoding))
        _, bad = read(path)
        assert any(each.endswith(f"; it looks like {encoding}: try --encoding {encoding}") for each in bad)
    path.write_bytes("\n\n".join("plain words"[:i] for i in range(1, 12)).encode("utf-16-le"))
    assert "looks like utf-16" in read(path)[1][0]
    dice = random.Random(1)
    for _ in range(200):  # for damaged UTF-8, the message must not suggest another encoding
        raw = bytearray("\n\n".join(CHINESE[:3]).encode())
        raw[dice.randrange(len(raw))] ^= 0x80
        path.write_bytes(raw)
        assert not any("looks like" in each for each in read(path)[1])
    path.write_text("\n\n".join(CHINESE), encoding="utf-8")
    with pytest.raises(InputError, match=SENTENCES["is_utf_8_not_gb18030"]):
        read(path, encoding="gb18030")
    with pytest.raises(InputError, match="--encoding 'klingon'"):
        find_files([str(path)], "klingon")
    path.write_bytes("好\n\n".encode("gb18030") + b"\xff\xff" + "\n\n好".encode("gb18030"))
    assert read(path, encoding="gb18030") == (["好", "好"], ["line 3: the text is not gb18030"])


def test_ascii_is_ascii(tmp_path: Path) -> None:
    """The error on an overlong ASCII document does not suggest --encoding. ASCII text with --encoding utf-16 fails."""
    path = tmp_path / "x.txt"
    path.write_text("It is a truth universally acknowledged, that a single man. " * 200)
    _, bad = read(path)
    assert len(bad) == 1
    assert "--encoding" not in bad[0]
    for encoding in ("utf-16-le", "utf-16-be", "utf-16", "utf-32", "cp037"):
        for text in ("It is a truth universally acknowledged.", '{"a": "It is a truth"}\n\n' * 40):
            path.write_text(text)
            with pytest.raises(InputError, match=f"ASCII.*{encoding}.*--encoding"):
                read(path, encoding=encoding)
    for encoding in ("gb18030", "hz", "utf-7"):  # ASCII text is valid in these encodings
        for text in ("plain words, and more of them", CHINESE[0]):
            path.write_bytes(text.encode(encoding, "ignore"))
            assert read(path, encoding=encoding) == ([text.encode(encoding, "ignore").decode(encoding)], [])
    for text in ("春晓", "春眠不觉晓，处处闻啼鸟。", "%fSf"):
        path.write_bytes(text.encode("utf-16-le"))
        assert read(path, encoding="utf-16-le") == ([text], [])


def test_an_array_is_read_about_as_fast_as_lines(tmp_path: Path) -> None:
    """A JSON array takes at most five times the CPU time of JSON lines.

    An array is parsed twice: first to find where its items end.
    """
    records = [{"text": f"{i} " + "一段话" * 40} for i in range(12_000)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
    (tmp_path / "a.json").write_text(json.dumps(records, ensure_ascii=False))

    def seconds(name: str) -> float:
        begin = time.process_time()
        assert sum(1 for _ in texts([str(tmp_path / name)])) == 12_000
        return time.process_time() - begin

    pairs = [(seconds("a.json"), seconds("a.jsonl")) for _ in range(3)]
    assert min(a for a, _ in pairs) < 5 * min(b for _, b in pairs)


@pytest.mark.parametrize(("ending", "compress"), [(".bz2", bz2.compress), (".xz", lzma.compress)])
def test_what_follows_a_stream_is_read_or_is_damage(
    tmp_path: Path, ending: str, compress: Callable[[bytes], bytes]
) -> None:
    """A file of several compressed streams, as parallel compressors write, is read; damaged streams are reported."""
    streams = [compress(b"".join(b'{"text": "%d"}\n' % i for i in range(k, k + 100))) for k in (0, 100, 200)]
    path = tmp_path / f"x.jsonl{ending}"
    padding = b"\0" * 4 if ending == ".xz" else b""
    path.write_bytes(padding.join(streams) + padding)
    assert [text for text in texts([Source(str(path))], "text")] == [str(i) for i in range(300)]
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(streams[0]) + len(padding)] ^= 1
    for damaged in (bytes(flipped), whole + b"garbage", whole[:-9]):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=SENTENCES["damaged_compressed_data"]):
            list(texts([Source(str(path))], "text"))


def test_a_link_to_nothing_ends_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "b.jsonl").symlink_to("/gone/b.jsonl")
    for given in (str(tmp_path), f"{tmp_path}/*"):
        with pytest.raises(InputError, match=r"b\.jsonl.*/gone/b\.jsonl"):
            find_files([given])


def test_folders_behind_links_and_patterns(tmp_path: Path) -> None:
    """Each folder is read once, even if links and patterns reach it twice or a link leads to its parent."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "raw/c").mkdir(parents=True)
    for name in ("raw/a.jsonl", "raw/c/c.jsonl", "raw/c/.no.jsonl", "disk/w.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": Path(name).stem}) + "\n")
    (tmp_path / "raw/web").symlink_to(tmp_path / "disk")
    for pattern in ("raw", "raw/*", "raw/**", "r*", "[r]aw/**/*.jsonl"):
        said: list[str] = []
        assert list(texts(find_files([f"{tmp_path}/{pattern}"], say=said.append))) == ["a", "c", "w"], pattern
        assert said == []
    (tmp_path / "disk/back").symlink_to(tmp_path / "raw")
    (tmp_path / "raw/d").symlink_to(tmp_path / "raw/c")
    for pattern in ("raw", "raw/*", "raw/**", "raw/**/*.jsonl"):
        said = []
        assert list(texts(find_files([f"{tmp_path}/{pattern}"], say=said.append))) == ["a", "c", "w"], pattern
        assert len(said) == 1 and "raw/d" in said[0]


@pytest.mark.parametrize("error", [True, False], ids=["listing", "entering"])
def test_a_folder_that_cannot_be_read_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: bool) -> None:
    """An unreadable folder is an error. The test simulates the refused access, since root can read every folder."""
    (tmp_path / "a/b").mkdir(parents=True)
    for name in ("a/a.jsonl", "a/b/b.jsonl"):
        (tmp_path / name).write_text('{"text": "a"}\n')
    scandir, closed = os.scandir, str(tmp_path / "a/b")

    def refusing(path: Any = ".") -> Any:
        if os.fspath(path) == closed:
            raise PermissionError(errno.EACCES, "Permission denied", closed)
        return scandir(path)

    if error:
        monkeypatch.setattr(os, "scandir", refusing)
    else:
        monkeypatch.setattr(os, "access", lambda path, mode: str(path) != closed)
    for pattern in ("a", "*") if error else ("a", "*", "a/*/*.jsonl", "a/**/*.jsonl", "a/b/*"):
        with pytest.raises(InputError, match=SENTENCES["cannot_read_the_folder_a_b"]):
            find_files([f"{tmp_path}/{pattern}"])


def test_a_column_that_stands_there_twice(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,text\na,b\n")
    with pytest.raises(InputError, match=SENTENCES["line_1_the_header_lists_the"]):
        list(texts([Source(str(tmp_path / "a.csv"))], "text"))


@pytest.mark.parametrize("name", ["clean_corpus", "train_tokenizer"])
def test_nothing_is_written_over_what_is_read(tmp_path: Path, name: str) -> None:
    tool = importlib.import_module(f"data_utils.{name}")
    source, link = tmp_path / "a.jsonl", tmp_path / "link.jsonl"
    source.write_bytes((ROOT / "corpus/sample.jsonl").read_bytes())
    link.symlink_to(source)
    cases = [["--output", str(source)], ["--output", str(link)]]
    if name == "clean_corpus":
        cases += [
            ["--output", str(tmp_path / "b.jsonl"), "--dropped", dropped]
            for dropped in (str(source), str(tmp_path / "b.jsonl"))
        ]
    more = ["--vocab-size", "2000"] if name == "train_tokenizer" else []
    for case in cases:
        args = tool.build_parser().parse_args(["--input", str(tmp_path / "a.jsonl"), "--quiet", *more, *case])
        with pytest.raises(InputError, match=r"both input and output|the name of two outputs"):
            tool.main(args)
    assert source.read_bytes() == (ROOT / "corpus/sample.jsonl").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "link.jsonl"]
