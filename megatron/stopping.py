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

    def __init__(self, minutes: float | None) -> None:
        self._minutes = minutes
        self._asked = Wish.NOTHING
        self._before: dict[int, Any] = {}
        self._group: dist.ProcessGroup | None = None
        self._told: tuple[dist.Work, torch.Tensor] | None = None

    def __enter__(self) -> "Wishes":
        if threading.current_thread() is threading.main_thread():  # Python lets no other set handlers
            for number, wish in ((signal.SIGTERM, Wish.SAVE_AND_STOP), (signal.SIGUSR1, Wish.SAVE)):

                def ask(_: int, __: FrameType | None, wish: Wish = wish) -> None:
                    self._asked = max(self._asked, wish)

                self._before[number] = signal.signal(number, ask)
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")  # of the processes, whatever device they compute on
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._told is not None:  # after an error the others may not be there any more
            self._told[0].wait()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agree(self, done: bool = False) -> tuple[Wish, bool]:
        """(what any rank was asked for, whether all ranks are `done`), alike on all ranks.

        Of several ranks it is what they said one call ago: what they say now is on its way while they
        compute, so that no iteration waits for it.
        """
        asked, self._asked = self._asked, Wish.NOTHING
        if self._minutes is not None and time.monotonic() - BEGIN > 60 * self._minutes:
            asked = Wish.SAVE_AND_STOP
        if self._group is None:
            return asked, done
        mine = torch.tensor([int(asked), int(not done)])
        work = dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        before, self._told = self._told, (work, mine)
        if before is None:
            return Wish.NOTHING, False
        before[0].wait()
        most, any_not_done = before[1].tolist()
        return Wish(most), not any_not_done
