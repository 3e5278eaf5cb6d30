from types import SimpleNamespace

import pytest
import torch

from tds import Boundary, BoundaryError
from tds.boundary import boundaries_of, check

HIDDEN = torch.zeros(2, requires_grad=True) * 1
MASK = torch.zeros(2, dtype=torch.bool)


def test_the_lists_of_the_original_are_read() -> None:
    model = SimpleNamespace(
        _input_grad=[True, False], _input_type=["float", "bool"], _input_pipe_partitioned=[True, False]
    )
    found = boundaries_of(model)
    assert found is not None
    assert [(b.kind, b.grad, b.split) for b in found] == [("float", True, True), ("bool", False, False)]
    assert boundaries_of(SimpleNamespace()) is None


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ({"_input_grad": [True], "_input_type": ["float", "bool"]}, "_input_grad has 1, _input_type has 2"),
        ({"_input_type": ["half"]}, "kind 'half' is not one of float, int, bool"),
        ({"_input_grad": [True], "_input_type": ["int"]}, "is int, so it cannot have a gradient"),
    ],
)
def test_lists_that_cannot_be_are_refused(lists: dict[str, list[object]], message: str) -> None:
    with pytest.raises(BoundaryError, match=message):
        boundaries_of(SimpleNamespace(**lists))


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ((HIDDEN,), "stage 1 puts out 1 tensors, declared are 2: hidden, mask"),
        ((HIDDEN, MASK.float()), "stage 1: 'mask' is declared bool, got torch.float32"),
        ((HIDDEN, None), "stage 1: output 1 is NoneType"),
    ],
)
def test_what_differs_from_the_declaration_is_named(outputs: tuple[torch.Tensor, ...], message: str) -> None:
    with pytest.raises(BoundaryError, match=message):
        check(outputs, (Boundary("hidden"), Boundary("mask", "bool", grad=False)), stage=1)


def test_a_gradient_that_would_be_lost_is_refused() -> None:
    with pytest.raises(BoundaryError, match="declared without gradient but has one"):
        check((HIDDEN,), (Boundary("hidden", grad=False),), stage=0)


def test_what_fits_passes() -> None:
    check((HIDDEN, MASK), (Boundary("hidden"), Boundary("mask", "bool", grad=False)), stage=0)
    check((HIDDEN, MASK), None, stage=0)
