"""Ending a run in order: at a signal or after a given time every rank saves and stops at the same iteration.

SIGTERM, --exit-duration-in-mins    save, then end with code 0
SIGUSR1                             save, and go on
"""

import signal
import threading
import time
from enum import IntEnum
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

BEGIN = time.monotonic()


class Wish(IntEnum):
    """What the outside wants; of several ranks' wishes the greatest counts."""

    NOTHING = 0
    SAVE = 1
    SAVE_AND_STOP = 2


class Wishes:
    """Use as a context manager around the loop; `agree()` after every iteration, on every rank.

    minutes: stop when the process has run so long; None for never.
    """

    def __init__(self, minutes: float | None, device: torch.device) -> None:
        self._minutes, self._device = minutes, device
        self._asked = Wish.NOTHING
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Wishes":
        if threading.current_thread() is threading.main_thread():  # Python lets no other set handlers
            for number, wish in ((signal.SIGTERM, Wish.SAVE_AND_STOP), (signal.SIGUSR1, Wish.SAVE)):

                def ask(_: int, __: FrameType | None, wish: Wish = wish) -> None:
                    self._asked = max(self._asked, wish)

                self._before[number] = signal.signal(number, ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agree(self, busy: bool = False) -> tuple[Wish, bool]:
        """(what any rank was asked for since the last call, whether any rank is `busy`). A collective."""
        asked, self._asked = self._asked, Wish.NOTHING
        if self._minutes is not None and time.monotonic() - BEGIN > 60 * self._minutes:
            asked = Wish.SAVE_AND_STOP
        if dist.is_initialized() and dist.get_world_size() > 1:
            of_all = torch.tensor([int(asked), int(busy)], device=self._device)
            dist.all_reduce(of_all, op=dist.ReduceOp.MAX)
            most, any_busy = of_all.tolist()
            return Wish(most), bool(any_busy)
        return asked, busy
