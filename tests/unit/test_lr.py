import math

import pytest

from megatron.arguments import parse
from megatron.optim import lr_at


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


def test_constant_and_no_warmup() -> None:
    assert rates("--lr-decay-style", "constant", "--warmup", "0") == [1.0] * 120


def test_decay_may_end_before_the_run() -> None:
    found = rates("--lr-decay-iters", "50")
    assert found[49] == pytest.approx(0.1)
    assert found[60] == pytest.approx(0.1)
