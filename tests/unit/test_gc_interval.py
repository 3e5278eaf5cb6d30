"""`Garbage(n)` collects garbage only after every n-th step and restores Python's own settings at its end."""

import gc
import weakref

import pytest

from megatron.training.gc_interval import Garbage
from megatron.training.health import SampleRange


class _Ring:
    def __init__(self) -> None:
        self.me = self


def test_at_the_interval_and_not_before() -> None:
    with Garbage(3) as garbage:
        gone = weakref.ref(_Ring())
        for _ in range(2000):  # would trigger automatic collection if it were on
            _Ring()
        for iteration, there in ((1, True), (2, True), (3, False)):
            garbage.after_step(None, SampleRange(iteration, 0, 1))
            assert (gone() is not None) == there
        assert not gc.isenabled() and gc.get_freeze_count()
    assert gc.isenabled() and not gc.get_freeze_count()


def test_left_to_python() -> None:
    with Garbage(0) as garbage:
        garbage.after_step(None, SampleRange(1, 0, 1))
        assert gc.isenabled() and not gc.get_freeze_count()


def test_a_run_that_fails_leaves_python_as_it_was() -> None:
    gc.disable()
    try:
        with pytest.raises(ValueError), Garbage(1):
            raise ValueError
        assert not gc.isenabled()
    finally:
        gc.enable()
