"""The --help of the tools fits into the terminal, and its examples are commands."""

import shlex

import pytest

from data_utils.cli import Parser

COMMAND = (
    "python tools/do.py --input texts/ 'more/* of it.jsonl' --prompt \"Once upon   a time\" --number 3 --output-prefix "
    "data/all --seeds 1 2 3 --quiet"
)


@pytest.mark.parametrize("columns", [60, 80, 100, 150])
def test_lines_are_as_long_as_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    remark = "writes data/all.bin and data/all.idx, " * 5
    parser = Parser("What it does. " * 30, f"  {COMMAND}\n      {remark}")
    parser.add_argument("--kind", choices=[f"kind-number-{i}" for i in range(20)], help="the kind")
    parser.add_argument("--few", choices=["a", "b"])
    text = parser.format_help()
    assert max(map(len, text.splitlines())) <= columns
    assert all(f"kind-number-{i}" in text for i in range(20))
    assert "--few {a,b}" in text
    examples = text[text.index("examples:") :].replace("\\\n", "")
    (found,) = (line for line in examples.splitlines() if line.startswith("  python"))
    assert shlex.split(found) == shlex.split(COMMAND)
