"""Progress display: a bar on a terminal, or an occasional line in log files."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from tqdm import tqdm

LINE_SECONDS = 30.0  # seconds between two lines if stderr is not a terminal


class Progress:
    """Progress of an iterable, or of work reported with `update`.

    total: number of all units of work, None if unknown. initial: number of units that an earlier run did.
    disable: show nothing.
    """

    def __init__(
        self,
        items: Iterable[Any] = (),
        *,
        desc: str,
        unit: str,
        total: int | None = None,
        initial: int = 0,
        unit_scale: bool = False,
        disable: bool = False,
    ) -> None:
        is_tty = sys.stderr.isatty()
        self._items = items
        self._desc = desc
        self._unit = unit
        self._total = total
        self._done = initial
        self._prints_lines = not is_tty and not disable
        self._note = ""  # with the comma in front of it
        self._started = self._printed = time.monotonic()
        self._bar: Any = tqdm(
            total=total, initial=initial, desc=desc, unit=unit, unit_scale=unit_scale, disable=disable or not is_tty
        )

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def update(self, count: int = 1) -> None:
        """Report `count` more units as done."""
        self._done += count
        self._bar.update(count)
        # On a terminal, the bar is enough. In a log file, the next line is due after LINE_SECONDS.
        if not self._prints_lines or time.monotonic() - self._printed < LINE_SECONDS:
            return
        self._printed = time.monotonic()
        done = tqdm.format_sizeof(self._done)
        if self._total:
            done += f" of {tqdm.format_sizeof(self._total)} ({self._done / self._total:.0%})"
        message = f"{self._desc}: {done} {self._unit.strip()} in {self.elapsed:.0f} s{self._note}"
        print(message, file=sys.stderr, flush=True)

    def set_note(self, note: str) -> None:
        """Set the text shown beside the progress."""
        self._note = f", {note}"
        self._bar.set_postfix_str(note)

    def __iter__(self) -> Iterator[Any]:
        with self:
            for item in self._items:
                yield item
                self.update()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
