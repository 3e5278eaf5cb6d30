"""Tables as lines of text."""

import shutil
from collections.abc import Iterator, Sequence
from typing import Any


def align_columns(rows: Sequence[Sequence[Any]], left: int | None = None) -> list[str]:
    """Return the rows of a table as lines with aligned columns. left: number of columns aligned left, None for all."""
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
    return lines


def split_columns(rows: Sequence[Sequence[str]], gap: int) -> Iterator[list[tuple[str, ...]]]:
    """Yield parts of a table that fit the terminal, each with the first column and some of the others.

    The whole table is one part if the output is no terminal and COLUMNS is not set. gap: characters between columns.
    """
    max_width = shutil.get_terminal_size((1_000_000, 0)).columns
    # From rows to columns.
    first, *others = zip(*rows, strict=True)
    columns = [first]
    first_width = max(map(len, first))
    width = first_width
    for column in others:
        added = gap + max(map(len, column))
        # A part has at least one column besides the first, even if it is too wide.
        if len(columns) > 1 and width + added > max_width:
            yield list(zip(*columns, strict=True))
            columns = [first]
            width = first_width
        columns.append(column)
        width += added
    yield list(zip(*columns, strict=True))
