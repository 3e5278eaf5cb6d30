"""Tables that fit the terminal."""

import shutil
from collections.abc import Iterator, Sequence


def split_columns(rows: Sequence[Sequence[str]], gap: int) -> Iterator[list[tuple[str, ...]]]:
    """Yield parts of a table that fit the terminal, each with the first column and some of the others.

    The whole table is one part if the output is no terminal and COLUMNS is not set. gap: characters between columns.
    """
    # The fallback is a width that every table fits, and a height that does not matter.
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
