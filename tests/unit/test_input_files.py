"""Input files of the data tools: which files are read, and where a document begins."""

from pathlib import Path

from data_utils.documents import chunks, documents
from data_utils.files import Source, find_files

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


def test_a_link_to_a_file_that_is_read_is_skipped_with_a_message(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "b.txt").symlink_to("a.txt")
    (tmp_path / "folder" / "c.txt").symlink_to(tmp_path / "a.txt")
    (tmp_path / "folder" / "d.txt").write_text("one\n")  # a copy is another file
    messages: list[str] = []
    found = find_files([str(tmp_path)], say=messages.append)
    assert [Path(source.path).name for source in found] == ["a.txt", "d.txt"]
    (message,) = messages
    assert "b.txt" in message and "c.txt" in message
