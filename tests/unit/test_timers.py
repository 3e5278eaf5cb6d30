import time

import pytest

from megatron.timers import Timers
from tests.sentences import SENTENCES


def test_both_forms_add_to_the_same_part() -> None:
    timers = Timers()
    timers("read").start()
    time.sleep(0.02)
    timers("read").stop()
    with timers("read"):
        time.sleep(0.02)
    assert 0.04 <= timers("read").elapsed(reset=False) < 1
    assert timers("read").elapsed() >= 0.04
    assert timers("read").elapsed() == 0
    assert timers.take() == {}


def test_a_running_timer_is_read_and_goes_on() -> None:
    timers = Timers()
    timers("train").start()
    time.sleep(0.02)
    first = timers("train").elapsed()
    time.sleep(0.01)
    timers("train").stop()
    assert first >= 0.02 and 0.01 <= timers.take()["train"] < first + 1


def test_a_timer_out_of_turn_is_named() -> None:
    timers = Timers()
    with pytest.raises(RuntimeError, match=SENTENCES["x_does_not_run_start_it"]):
        timers("x").stop()
    timers("x").start()
    with pytest.raises(RuntimeError, match=SENTENCES["x_runs_already_stop_it_before"]):
        timers("x").start()
    timers("x").reset()
    timers("x").start()


def test_log_prints_a_line_and_begins_again(capsys: pytest.CaptureFixture[str]) -> None:
    timers = Timers()
    with timers("a"), timers("b"):
        time.sleep(0.01)
    timers.log(["a", "never"], normalizer=2)
    line = capsys.readouterr().out
    assert line.startswith("time (ms) | a: ") and line.endswith(" | never: 0.00\n")
    assert 5 <= float(line.split("a: ")[1].split(" ")[0]) < 500
    assert list(timers.take()) == ["b"]
