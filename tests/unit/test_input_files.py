"""Input files of the data tools: which files are read, and where a document begins."""

import argparse
import csv
import gzip
import json
import time
from pathlib import Path

import numpy as np
import pytest

from data_utils import documents as data_documents
from data_utils import records
from data_utils.cli import max_document_bytes
from data_utils.documents import chunks, documents
from data_utils.files import Source, find_files
from data_utils.streams import BadLine, InputError, detect_encoding
from data_utils.tokenizer_training import train_byte_bpe, train_cpm_vocab

MARK = "\ufeff"


def texts_of(path: Path, size: int = 1 << 20) -> list[str]:
    return [text for chunk in chunks(Source(str(path)), size) for (text,) in documents(chunk)]  # type: ignore[misc]


def test_only_the_byte_order_mark_of_a_file_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(f"{MARK}one\n\n{MARK}two\n\nthree{MARK}\n", encoding="utf-8")
    assert texts_of(path) == ["one", f"{MARK}two", f"three{MARK}"]
    assert texts_of(path, 4) == ["one", f"{MARK}two", f"three{MARK}"]


def test_concatenated_json_lines_may_contain_byte_order_marks(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text(f'{MARK}{{"text": "one"}}\n{MARK}{{"text": "two"}}\n', encoding="utf-8")
    assert texts_of(path) == ["one", "two"]


def test_zstd_files_may_have_the_largest_window(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    line = b'{"text": "one"}\n'
    magic = bytes.fromhex("28b52ffd")
    window = bytes([0, 21 << 3])  # 2**(10 + 21) bytes, as of `zstd --long=31`
    block = (len(line) << 3 | 1).to_bytes(3, "little")  # the last block, not compressed
    path = tmp_path / "text.jsonl.zst"
    path.write_bytes((magic + window + block + line) * 2)
    assert texts_of(path) == ["one", "one"]


def test_a_folder_of_outputs_of_the_tools_is_no_folder_of_unsupported_types(tmp_path: Path) -> None:
    path = tmp_path / "dropped.jsonl"
    path.write_text(json.dumps({"reason": "too short", "text": "abc"}) + "\n")
    with pytest.raises(InputError, match="1 files, 1 are outputs of the data tools.* 0 are not of a supported type"):
        find_files([str(tmp_path)])
    assert find_files([str(path)]) == [Source(str(path))]  # as the error advises
    with pytest.raises(InputError, match="of 0 files"):
        find_files([str(tmp_path / "*.txt")])


def test_a_plain_file_on_a_faulty_disk_is_not_called_compressed(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.symlink_to("/proc/self/mem")  # reading its beginning is an I/O error
    with pytest.raises(InputError, match=f"{path}.* cannot read "):
        texts_of(path)


def test_a_link_to_a_file_that_is_read_is_skipped_with_a_message(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "b.txt").symlink_to("a.txt")
    (tmp_path / "folder" / "c.txt").symlink_to(tmp_path / "a.txt")
    (tmp_path / "folder" / "d.txt").write_text("one\n")  # a copy is another file
    messages: list[str] = []
    found = find_files([str(tmp_path)], notify=messages.append)
    assert [Path(source.path).name for source in found] == ["a.txt", "d.txt"]
    (message,) = messages
    assert "b.txt" in message and "c.txt" in message
    for twice in ("a.txt", "*.txt", "a.txt@0.5", "b.txt"):
        with pytest.raises(InputError, match=r"a.txt is given twice|b.txt is given twice"):
            find_files([str(tmp_path), str(tmp_path / twice)], notify=messages.append)


@pytest.mark.parametrize("compressed", [False, True])
def test_auto_finds_the_encoding_of_each_file(tmp_path: Path, compressed: bool) -> None:
    """Files in four encodings give the same documents, also if the first megabyte ends within a character."""
    text = "清晨，小明在学校门口等最后一班船，ABC 听见远处有人唱歌。\n谁在旧书店里写信？"
    long = "".join(f"这是第{number}句，" for number in range(150_000))
    encodings = ["utf-8", "gb18030", "utf-16", "utf-16-le"]
    for number, encoding in enumerate(encodings):
        content = f"{text}\n\nplain English text\n\n{long}".encode(encoding)
        path = tmp_path / f"{number}.txt{'.gz' if compressed else ''}"
        path.write_bytes(gzip.compress(content) if compressed else content)
    (tmp_path / f"{len(encodings)}.txt").write_text("only ASCII")
    sources = find_files([str(tmp_path)], "auto")
    assert [source.encoding for source in sources] == [*encodings, "utf-8"]
    for source in sources[:-1]:
        found = [each for chunk in chunks(source, 1 << 20) for (each,) in documents(chunk)]  # type: ignore[misc]
        assert found == [text, "plain English text", long]


def test_a_character_that_the_first_megabyte_cuts_does_not_change_the_encoding(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(b"plain English text ".ljust(2**20 - 2, b"a") + "\u2014 end\n".encode())
    assert detect_encoding(str(path)) == "utf-8"


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("すべての人間は、生れながらにして自由であり、かつ、尊厳と権利とについて平等である。" * 9, "shift_jis"),
        ("모든 국민은 인간으로서의 존엄과 가치를 가지며 행복을 추구할 권리를 가진다. " * 9, "euc_kr"),
        ("天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。寒来暑往，秋收冬藏。" * 9, "gb18030"),
        ("".join(f"第{number}号、张伟、王芳、李娜、刘洋、陈静、" for number in range(60)), "gb18030"),
    ],
)
def test_japanese_and_korean_files_are_not_taken_for_chinese(text: str, encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(text.encode(encoding))
    assert detect_encoding(str(path)) == ("gb18030" if encoding == "gb18030" else "utf-8")  # "utf-8" ends in an error


@pytest.mark.parametrize("blank", ["\u3000", "\f", "\u00a0", MARK, " \t"])
@pytest.mark.parametrize("compressed", [False, True])
def test_no_document_after_an_overlong_one_is_lost(tmp_path: Path, compressed: bool, blank: str) -> None:
    """The blank line between them is cut at each of its bytes by the end of a block."""
    path = tmp_path / ("x.txt.gz" if compressed else "x.txt")
    for shift in range(len(blank.encode()) + 3):
        content = b"x" * (4096 - shift) + f"\n{blank}\nsecond\n\nthird".encode()
        path.write_bytes(gzip.compress(content) if compressed else content)
        found = []
        for chunk in chunks(Source(str(path)), 1024, 2048):
            found += list(documents(chunk, largest=2048))
        assert isinstance(found[0], BadLine)
        assert found[1:] == [("second",), ("third",)]


@pytest.mark.parametrize("name", ["x.txt", "x.txt.gz", "x.csv", "x.json"])
def test_documents_between_overlong_ones_are_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Overlong documents consist of escapes in JSON, and of an overlong line and an empty one in CSV."""
    monkeypatch.setattr(records, "BLOCK", 1024)
    path = tmp_path / name
    for shift in range(4):
        overlong = "A" * shift + "\\" * 4000 + '"yes"\n'
        texts = [overlong, "b" * 500, "D" * 2030, "e", overlong, "g", "h"]
        with (gzip.open if path.suffix == ".gz" else open)(path, "wt", newline="") as file:
            if path.suffix == ".csv":
                csv.writer(file).writerows([[text] for text in ["text", *texts]])
            elif path.suffix == ".json":
                json.dump([{"text": text} for text in texts], file)
            else:
                file.write("\n\n".join(texts))
        found = []
        for chunk in chunks(Source(str(path)), 1550, 2048):
            found += list(documents(chunk, largest=2048))
        assert [isinstance(each, BadLine) or each for each in found] == [
            True if text is overlong else (text,) for text in texts
        ]


def test_tokenizers_in_a_folder_and_empty_columns_are_skipped(tmp_path: Path) -> None:
    train_byte_bpe(["text"], str(tmp_path / "bpe"), 257, "gpt2-bpe")
    train_byte_bpe(["text"], str(tmp_path / "tokenizer.json"), 257, "hf")
    train_cpm_vocab(["字"], str(tmp_path / "vocab.txt"), 261)
    (tmp_path / "x.csv").write_text("text,label,,\none,1,,\n")
    assert [source.path for source in find_files([str(tmp_path)])] == [str(tmp_path / "x.csv")]
    assert texts_of(tmp_path / "x.csv") == ["one"]


def test_a_long_document_takes_time_linear_in_its_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = ("word " * 200 + "line\n") * 2000
    (tmp_path / "x.txt.gz").write_bytes(gzip.compress(f"{text}\nsecond\n".encode(), 1))
    begin = time.process_time()
    found = list(chunks(Source(str(tmp_path / "x.txt.gz")), 4096, 1 << 24))
    assert time.process_time() - begin < 1  # 4 s if each block is searched again with each later one
    assert b"".join(chunk.read() for chunk in found).decode() == f"{text}\nsecond\n"
    (tmp_path / "x.json").write_text(json.dumps([{"text": text}, {"text": "second"}]))
    monkeypatch.setattr(records, "BLOCK", 4096)
    parse = records._JsonArray._parse
    calls = []
    monkeypatch.setattr(records._JsonArray, "_parse", lambda self: calls.append(1) or parse(self))
    assert texts_of(tmp_path / "x.json") == [text, "second"]
    assert len(calls) < 20


def test_a_file_is_read_once_for_the_lines_of_all_its_bad_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"123456789012345\n" * 70_000)
    monkeypatch.setattr(data_documents, "CHUNK_BYTES", 16)
    opened = []
    monkeypatch.setattr(data_documents, "open", lambda *args: opened.append(1) or open(*args), raising=False)  # noqa: SIM115
    chunk = data_documents.Chunk(Source(str(path)), 0, 70_000 * 16)
    assert chunk.line_number(69_999 * 16 + 3) == 70_000
    opened.clear()
    assert chunk.line_number(69_998 * 16) == 69_999 and chunk.line_number(0) == 1
    assert len(opened) < 10


def test_a_file_without_the_byte_order_mark_that_its_encoding_needs_is_named(tmp_path: Path) -> None:
    for number, encoding in enumerate(("utf-16-le", "gb18030")):
        path = tmp_path / f"{number}.txt"
        path.write_bytes(("中文文本，写得很长。\n" * 50).encode(encoding))
        with pytest.raises(InputError, match=path.name):
            list(chunks(Source(str(path), encoding="utf-16")))


@pytest.mark.parametrize("megabytes", [1e13, 1e300])
def test_a_csv_file_may_have_any_limit_of_a_document(tmp_path: Path, megabytes: float) -> None:
    largest = max_document_bytes(argparse.Namespace(max_document_mb=megabytes))
    path = tmp_path / "x.csv"
    path.write_text("text\nfirst\n")
    found = [each for chunk in chunks(Source(str(path)), largest=largest) for each in documents(chunk, largest=largest)]
    assert found == [("first",)]


@pytest.mark.parametrize(
    ("ending", "content", "end"),
    [
        ("csv", "text\n{}", "outside quotes"),
        ("json", '[{{"text": "{}"}}]', "}}"),
        ("parquet", "", "row"),
        ("jsonl", '{{"text": "{}"}}', "line break"),
        ("txt", "{}", "blank line"),
    ],
)
def test_an_overlong_document_is_reported_with_the_end_of_its_format(
    tmp_path: Path, ending: str, content: str, end: str
) -> None:
    """Its characters are few enough, but not its bytes."""
    path = tmp_path / f"x.{ending}"
    if ending == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"text": ["春" * 50]}), path)
    else:
        path.write_text(content.format("春" * 50))
    (bad,) = [each for chunk in chunks(Source(str(path))) for each in documents(chunk, largest=130)]
    assert isinstance(bad, BadLine)
    reason = bad.reason.rpartition("; ")[2]
    assert end.format() in reason and ("line" in reason) == (ending != "parquet")


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_row_of_parquet_that_is_not_utf_8_is_one_bad_document(tmp_path: Path, is_nested: bool) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = [b"first", "坏".encode("gb18030"), b"third"]
    offsets = np.cumsum([0, *map(len, texts)]).astype(np.int32)
    buffers = [None, pyarrow.py_buffer(offsets.tobytes()), pyarrow.py_buffer(b"".join(texts))]
    column = pyarrow.Array.from_buffers(pyarrow.string(), 3, buffers)
    path = tmp_path / "x.parquet"
    if is_nested:
        more = pyarrow.ListArray.from_arrays(pyarrow.array([0, 1, 2, 3], pyarrow.int32()), column)
        table = pyarrow.table({"text": ["first", "second", "third"], "more": more})
    else:
        table = pyarrow.table({"text": column})
    parquet.write_table(table, path)
    found = [each for chunk in chunks(Source(str(path))) for each in documents(chunk)]
    assert [each for each in found if not isinstance(each, BadLine)] == [("first",), ("third",)]
    (bad,) = [each for each in found if isinstance(each, BadLine)]
    assert bad.line == 2


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("It’s the whale’s skeleton, don’t you think? We’ve seen it before, and he’ll be back. ", "cp1252"),
        ("Der größte Teil der Bevölkerung lebt in Städten, und die Dörfer werden größer. ", "latin-1"),
        ("El niño comió la piñata en la montaña, y su compañera soñó con el otoño. ", "latin-1"),
        ("Les élèves étaient déjà à l'école, où la maîtresse les a félicités. ", "latin-1"),
        ("På lördag åker vi till sjön för att bada i den varma solen. ", "latin-1"),
        ("Çünkü görüşmek için öğretmen geldi. ", "cp1254"),
    ],
)
def test_western_european_files_are_not_taken_for_chinese(text: str, encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes((text * 3).encode(encoding))
    assert detect_encoding(str(path)) == "utf-8"  # which ends in an error


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):  # 返回的是一个数\n    return x\n",
        "name,city\nJohn,北京\nMary,上海市\n",
        "10001,张伟,13800000000\n",
        '{"name": "张伟", "city": "淄博"}\n',
        "臺灣的學生們在圖書館裡讀書，聽見窗外的鳥兒歌唱。\n",
    ],
)
def test_ascii_with_some_chinese_characters_is_found(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes((text * 20).encode("gb18030"))
    assert detect_encoding(str(path)) == "gb18030"
