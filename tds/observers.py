"""Observers of a pipeline engine: objects that it informs about each instruction and each other part of a step."""

from collections.abc import Iterator
from contextlib import contextmanager

from .schedule import Instruction

What = Instruction | str  # an instruction, or the name of another part of a step, such as "Step"


class Observer:
    """Base class of observers; `engine.observers.append(MyObserver())` registers one.

    what: an instruction of the schedule, or the name of another part of a step: "train_batch", "eval_batch", "Begin",
    "Read", "Reduce", "Loss", "Step" or "Flush". Parts may be nested. If a part raises an error, its `end` is not
    called.
    """

    def begin(self, what: What) -> None:
        """Observe that this rank begins an instruction or a part of a step."""

    def end(self, what: What) -> None:
        """Observe that this rank has submitted all work of an instruction or a part of a step."""

    def waiting(self, doing: str) -> None:
        """Observe that this rank may wait for other ranks from now on. doing: its activity, for a report."""


process_observers: list[Observer] = []  # observers of all engines of this process


class Observers(list[Observer]):
    """The observers of an engine, in the order in which they are called."""

    @contextmanager
    def around(self, what: What) -> Iterator[None]:
        """Inform the observers when an instruction or a part of a step begins, and when it ended without an error."""
        observers = [*self, *process_observers]
        for each in observers:
            each.begin(what)
        yield
        for each in observers:
            each.end(what)

    def waiting(self, doing: str) -> None:
        """Inform the engine's observers that this rank may wait for other ranks; see `Observer.waiting`."""
        for each in self:
            each.waiting(doing)
