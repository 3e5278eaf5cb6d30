"""Background saves: a thread copies this rank's tensors to the CPU and writes the copies."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from tds import optimizer_state as zero_state

Named = tuple[str, Tensor]  # key of a tensor in the checkpoint, and its value
Write = Callable[[list[Named]], None]
Fail = Callable[[Exception], None]


class BackgroundCopy:
    """Copier of a rank's tensors. Training continues meanwhile; only an optimizer step waits for the copy."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._copied = threading.Event()  # set while no copy is being made
        self._copied.set()
        zero_state.before_step(engine, self._wait)

    def _wait(self) -> None:
        self._copied.wait()

    def start(self, values: Iterator[Named], write: Write, fail: Fail) -> threading.Thread | None:
        """Start a thread that copies `values` to the CPU and passes the copies to `write`; return the thread.

        fail: function that is called with the error if the copy fails. Without memory or threads, return None.
        """
        try:
            live = self._read(values)
            stream = zero_state.side_stream(self._engine.device)
            self._copied.clear()
            thread = threading.Thread(target=self._run, args=(live, stream, write, fail), daemon=True)
            thread.start()
        except Exception as error:
            self._copied.set()
            fail(error)
            return None
        return thread

    def _read(self, values: Iterator[Named]) -> deque[Named]:
        """Read the values before the thread starts, because reading a value may be a collective."""
        if not zero_state.reads_copies(self._engine):
            return deque(values)
        # The device may not have memory for all copies, so each one moves to the CPU at once.
        return deque((key, value.cpu()) for key, value in values)

    def _run(self, live: deque[Named], stream: AbstractContextManager[Any], write: Write, fail: Fail) -> None:
        copies: list[Named] = []
        try:
            with stream:
                while live:
                    key, value = live.popleft()
                    copies.append((key, value.to("cpu", copy=True)))
                    del value
        except Exception as error:  # for example, memory may be exhausted
            fail(error)
            return
        finally:
            live.clear()
            self._copied.set()
        write(copies)
