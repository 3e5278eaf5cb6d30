"""--manual-gc-interval n collects garbage only after every n-th step and restores Python's own settings at its end."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.config.command_line import parse
from megatron.features.garbage import Garbage
from megatron.training.features import Features
from megatron.training.health import SampleRange


class _Ring:
    def __init__(self) -> None:
        self.me = self


@contextmanager
def _collecting(interval: int) -> Iterator[Garbage]:
    features = Features.__new__(Features)
    features.append(Garbage())
    run: Any = SimpleNamespace(config=parse(["--manual-gc-interval", str(interval)], {"family": "gpt2"}))
    with features.running(run):
        yield features[0]


def test_at_the_interval_and_not_before() -> None:
    with _collecting(3) as garbage:
        gone = weakref.ref(_Ring())
        for _ in range(2000):  # would trigger automatic collection if it were on
            _Ring()
        for iteration, there in ((1, True), (2, True), (3, False)):
            garbage.after_step(None, SampleRange(iteration, 0, 1))
            assert (gone() is not None) == there
        assert not gc.isenabled() and gc.get_freeze_count()
    assert gc.isenabled() and not gc.get_freeze_count()


def test_left_to_python() -> None:
    features = Features(parse(["--manual-gc-interval", "0"], {"family": "gpt2"}))
    assert not any(isinstance(each, Garbage) for each in features)


def test_a_run_that_fails_leaves_python_as_it_was() -> None:
    gc.disable()
    try:
        with pytest.raises(ValueError), _collecting(1):
            raise ValueError
        assert not gc.isenabled()
    finally:
        gc.enable()
