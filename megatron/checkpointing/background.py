"""Background saves: a thread copies this rank's tensors to the CPU and writes the copies."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from tds import optimizer_state as zero_state

NamedTensor = tuple[str, Tensor]  # key of a tensor in the checkpoint, and its value
Write = Callable[[list[NamedTensor]], None]
OnFailure = Callable[[Exception], None]


class BackgroundCopy:
    """Copier of a rank's tensors. Training continues meanwhile; only an optimizer step waits for the copy."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._copy_finished = threading.Event()  # set while no copy is being made
        self._copy_finished.set()
        zero_state.before_step(engine, self._wait_for_copy)

    def _wait_for_copy(self) -> None:
        self._copy_finished.wait()

    def start(self, values: Iterator[NamedTensor], write: Write, on_failure: OnFailure) -> threading.Thread | None:
        """Start a thread that copies `values` to the CPU and passes the copies to `write`; return the thread.

        on_failure: function that is called with the error if the copy fails. Without memory or threads, return None.
        """
        returns_copies = zero_state.returns_copies(self._engine)
        try:
            # The tensors still to be copied. They are read before the thread starts: reading one may be a collective.
            remaining = deque[NamedTensor]()
            for key, value in values:
                # A copy is made on the device when it is read. The device may not have memory for all of them, so each
                # copy moves to the CPU at once.
                remaining.append((key, value.cpu() if returns_copies else value))
            # The copies run on a stream of their own, beside the kernels of the training.
            stream = zero_state.side_stream(self._engine.device)
            self._copy_finished.clear()  # from now on, an optimizer step waits for the copy
            arguments = (remaining, stream, write, on_failure)
            thread = threading.Thread(target=self._copy_and_write, args=arguments, daemon=True)
            thread.start()
        except Exception as error:
            self._copy_finished.set()
            on_failure(error)
            deque(values, maxlen=0)  # read the other values, as the other ranks do
            return None
        return thread

    def _copy_and_write(
        self, remaining: deque[NamedTensor], stream: AbstractContextManager[Any], write: Write, on_failure: OnFailure
    ) -> None:
        """Copy the tensors of `remaining` in the thread, each freed as soon as it is copied, and write the copies."""
        copies: list[NamedTensor] = []
        try:
            device = self._engine.device
            if device.type != "cpu":  # a thread begins on device 0, which the stream's exit would set again
                torch.accelerator.set_device_index(device.index)
            with stream:
                while remaining:
                    key, value = remaining.popleft()
                    copies.append((key, value.to("cpu", copy=True)))
                    del value  # free its memory on the device before the next tensor is copied
        except Exception as error:  # for example, memory may be exhausted
            on_failure(error)
            return
        finally:
            remaining.clear()  # after an error, free the tensors that are left
            self._copy_finished.set()  # from now on, optimizer steps may change the weights
        write(copies)
