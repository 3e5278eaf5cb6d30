"""Tables as lines of text."""

from collections.abc import Sequence
from typing import Any


def align_columns(rows: Sequence[Sequence[Any]], left: int | None = None) -> str:
    """Return the rows of a table as text with aligned columns. left: number of columns aligned left, None for all."""
    columns = []
    for number, column in enumerate(zip(*rows, strict=True)):
        cells = list(map(str, column))
        width = max(map(len, cells))
        aligns_left = left is None or number < left
        pad = str.ljust if aligns_left else str.rjust
        columns.append([pad(cell, width) for cell in cells])
    lines = []
    for row in zip(*columns, strict=True):
        lines.append("  ".join(row).rstrip())
    return "\n".join(lines)
