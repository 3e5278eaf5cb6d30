import math
import re

import pytest

from megatron.config.command_line import parse
from megatron.config.fields import ConfigError
from megatron.optim import lr_at
from megatron.optim.resumed_lr import describe, resolve_lr_schedule


def rates(*argv: str) -> list[float]:
    config = parse(["--train-iters", "100", "--lr", "1.0", "--min-lr", "0.1", "--warmup", "0.1", *argv])
    return [lr_at(i, config) for i in range(120)]


@pytest.mark.parametrize("style", ["cosine", "linear"])
def test_rises_to_the_peak_and_ends_where_it_should(style: str) -> None:
    found = rates("--lr-decay-style", style)
    assert found[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert max(found) == found[9] == 1.0
    assert found[99] == pytest.approx(0.1)
    assert found[100:] == pytest.approx([0.1] * 20)
    assert all(a > b for a, b in zip(found[9:99], found[10:100], strict=True))


def test_closed_forms() -> None:
    done = [(i + 1 - 10) / 90 for i in range(10, 100)]
    assert rates("--lr-decay-style", "linear")[10:100] == pytest.approx([0.1 + 0.9 * (1 - d) for d in done])
    cosine = [0.1 + 0.45 * (1 + math.cos(math.pi * d)) for d in done]
    assert rates("--lr-decay-style", "cosine")[10:100] == pytest.approx(cosine)


def test_wsd_stays_until_the_fall() -> None:
    forms = {
        "linear": lambda f: 1 - f,
        "cosine": lambda f: (1 + math.cos(math.pi * f)) / 2,
        "minus-sqrt": lambda f: 1 - f**0.5,
        "exponential": lambda f: 2 ** (1 - f) - 1,
    }
    for style, form in forms.items():
        found = rates("--lr-decay-style", "wsd", "--lr-wsd-decay-iters", "20", "--lr-wsd-decay-style", style)
        assert found[9:80] == [1.0] * 71
        assert found[80:100] == pytest.approx([0.1 + 0.9 * form((i + 1) / 20) for i in range(20)])
        assert found[100:] == pytest.approx([0.1] * 20)
    short = rates("--lr-decay-style", "wsd")
    assert short[89] == 1.0 > short[90]
    config = parse(["--train-iters", "100", "--lr", "1e-3", "--lr-decay-style", "wsd"])
    words = "up to 0.001 over 1 iterations, constant until iteration 90, minus-sqrt to 0 at iteration 100"
    assert describe(config) == words
    longer = parse(["--train-iters", "200", "--lr", "1e-3", "--lr-decay-style", "wsd", "--lr-wsd-decay-iters", "20"])
    kept, note = resolve_lr_schedule(longer, config)
    assert note and [lr_at(n, kept) for n in range(100)] == [lr_at(n, config) for n in range(100)]


def test_constant_and_no_warmup() -> None:
    assert rates("--lr-decay-style", "constant", "--warmup", "0") == [1.0] * 120


def test_decay_may_end_before_the_run() -> None:
    found = rates("--lr-decay-iters", "50")
    assert found[49] == pytest.approx(0.1)
    assert found[60] == pytest.approx(0.1)


def test_a_checkpoints_schedule_stays_unless_the_flags_are_to_win() -> None:
    saved = parse(["--train-iters", "100", "--lr", "1e-3", "--min-lr", "1e-5", "--warmup", "0.1"])
    longer = ["--train-iters", "200", "--lr", "1e-3", "--min-lr", "1e-5", "--warmup", "0.1"]
    config, note = resolve_lr_schedule(parse(longer), saved)
    there = "up to 0.001 over 10 iterations, cosine to 1e-05 at iteration 100"
    here = "up to 0.001 over 20 iterations, cosine to 1e-05 at iteration 200"
    assert (
        note == f"the learning rate follows the checkpoint's schedule ({there}); "
        f"pass --override-lr-schedule to follow the flags ({here})"
    )
    assert config.train.train_iters == 200
    assert [lr_at(n, config) for n in range(100)] == [lr_at(n, saved) for n in range(100)]
    assert resolve_lr_schedule(config, saved) == (config, None)  # a second resume with these settings changes nothing
    config, note = resolve_lr_schedule(parse([*longer, "--override-lr-schedule"]), saved)
    assert note == f"the learning rate follows the flags ({here}), no longer the checkpoint's schedule ({there})"
    assert lr_at(150, config) == lr_at(150, parse(longer))
    same = [*longer, "--train-iters", "150", "--lr-decay-iters", "100"]
    assert resolve_lr_schedule(parse(same), saved)[1] is None


def test_a_fall_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="--lr-wsd-decay-iters.*--warmup"):
        rates("--lr-decay-style", "wsd", "--lr-wsd-decay-iters", "95")


def test_an_end_above_the_peak_is_refused() -> None:
    with pytest.raises(ConfigError, match="--min-lr.*--lr"):
        parse(["--lr", "5e-6", "--min-lr", "1e-5"])
    parse(["--lr", "5e-6", "--min-lr", "1e-5", "--lr-decay-style", "constant"])  # a constant rate ignores --min-lr


@pytest.mark.parametrize(
    ("share", "total", "rise"),
    [("0.29", 100, 29), ("0.145", 200, 29), ("0.0003", 10_000, 3), ("0.043", 5000, 215), ("0.299", 100, 29)],
)
def test_rounding_takes_no_iteration_from_the_warmup(share: str, total: int, rise: int) -> None:
    config = parse(["--lr", "1", "--lr-decay-style", "constant", "--warmup", share, "--train-iters", str(total)])
    assert lr_at(rise - 2, config) < lr_at(rise - 1, config) == 1
    assert f"over {rise} iterations" in describe(config)


def test_schedules_with_one_curve_give_no_note() -> None:
    constant = ["--lr-decay-style", "constant", "--warmup", "0", "--lr", "1e-3"]
    saved = parse(["--train-iters", "100", *constant])
    longer = parse(["--train-iters", "200", "--min-lr", "1e-5", *constant])
    assert resolve_lr_schedule(longer, saved) == (longer, None)


def test_the_sides_of_a_note_differ() -> None:
    saved = parse(["--train-iters", "100", "--lr", "1e-3"])
    config, note = resolve_lr_schedule(parse(["--train-iters", "100", "--lr", "1.00000001e-3"]), saved)
    assert config.optim.lr == 1e-3 and note
    there, here = re.findall(r"\((.*?)\)", note)
    assert there != here


@pytest.mark.parametrize("warmup", ["0.95", "1"])
def test_a_schedule_whose_warmup_reaches_into_the_decay_stays_after_a_resume(warmup: str) -> None:
    flags = ["--lr", "1e-3", "--lr-decay-style", "wsd", "--warmup", warmup]
    saved = parse(["--train-iters", "100", *flags])
    kept, note = resolve_lr_schedule(parse(["--train-iters", "200", *flags]), saved)
    assert note and [lr_at(n, kept) for n in range(120)] == [lr_at(n, saved) for n in range(120)]
    assert resolve_lr_schedule(kept, saved) == (kept, None)


@pytest.mark.parametrize(("warmup", "last"), [("0.05", 90), ("0.95", 95)])
def test_the_description_of_wsd_names_the_last_iteration_before_the_decay(warmup: str, last: int) -> None:
    """The default decay takes the last tenth, or what a longer warm-up leaves of it."""
    config = parse(["--train-iters", "100", "--lr", "1", "--lr-decay-style", "wsd", "--warmup", warmup])
    assert lr_at(last - 1, config) == 1.0 > lr_at(last, config)
    assert f"until iteration {last}," in describe(config)
