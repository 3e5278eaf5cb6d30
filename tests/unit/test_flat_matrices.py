"""Buckets of weights that are stepped as wholes: balanced work, little padding, and no weight in two shares."""

import pytest
import torch
from torch import nn

from tds.flat_matrices import MOST_PADDING, balance, has_little_padding, place_weights


def _layer(h: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.empty(o, h)) for o in (3 * h, h, 4 * h, 4 * h)]


def test_work_is_balanced() -> None:
    work = [3.0, 1.0, 4.0, 4.0] * 12
    for replicas in (1, 2, 3, 8):
        owned = balance(work, replicas)
        assert sorted(at for own in owned for at in own) == list(range(len(work)))
        loads = [sum(work[at] for at in own) for own in owned]
        assert max(loads) - min(loads) <= max(work)
    assert balance([], 3) == [[], [], []]


@pytest.mark.parametrize("replicas", [1, 2, 3, 8, 50])
def test_each_weight_lies_in_one_share(replicas: int) -> None:
    weights = [p for _ in range(12) for p in _layer(64)]
    ordered, share = place_weights(weights, replicas, nn.Parameter.numel)
    assert {p for p in ordered if not p.is_meta} == set(weights)
    assert share % 64 == 0
    begin = 0
    for p in ordered:
        end = begin + p.numel()
        assert begin // share == (end - 1) // share < replicas
        begin = end
    assert end == share * replicas


def test_without_work_shares_have_no_gaps() -> None:
    weights = _layer(10)
    ordered, share = place_weights(weights, 3, None)
    assert ordered[:-1] == weights and share == 448
    assert ordered[-1].is_meta and ordered[-1].numel() == 3 * share - 1200


def test_a_bucket_grows_until_it_is_even() -> None:
    """One layer is uneven over two replicas (7 to 5), two layers are even; few matrices over many replicas are not."""
    work = nn.Parameter.numel
    assert not has_little_padding(_layer(64), 2, work)
    assert has_little_padding([*_layer(64), *_layer(64)], 2, work)
    assert not has_little_padding(_layer(64), 50, work)
    assert MOST_PADDING < 1 / 6
