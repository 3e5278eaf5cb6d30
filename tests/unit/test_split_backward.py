"""A backward pass split into input and weight gradients equals an unsplit one, and computes no gradient twice."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tds.split_backward import backward_input


class Odd(nn.Module):
    """A module with difficult cases for a split backward pass.

    Some weights are used twice, squared, or not at all; one output does not depend on the input.
    """

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.once, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.shift, self.alone = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
        self.squared, self.unused = nn.Linear(8, 8, bias=False), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.twice(self.once(self.norm(torch.relu(self.twice(x)) + (self.shift * 2).sin())))
        z = nn.functional.linear(y, self.squared.weight + self.squared.weight**2)
        left, right = z.split(4, -1)
        return left, right.sum() * y, self.alone.exp(), x


def block() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


MODELS: list[tuple[Callable[[], nn.Module], tuple[int, ...], set[str]]] = [
    (Odd, (5, 8), {"twice.weight", "twice.bias", "alone"}),
    (block, (2, 5, 16), set()),
    (lambda: nn.Sequential(block(), block(), block()), (2, 5, 16), set()),
]


@pytest.mark.parametrize(("make", "shape", "early"), MODELS, ids=["odd", "one block", "three blocks"])
def test_two_halves_make_a_whole(make: Callable[[], nn.Module], shape: tuple[int, ...], early: set[str]) -> None:
    torch.manual_seed(0)
    halves, whole = make().double(), make().double()
    whole.load_state_dict(halves.state_dict())
    found = []
    for model, split in ((halves, True), (whole, False)):
        x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        outputs = model(x)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        grads = [torch.cos(torch.arange(o.numel(), dtype=o.dtype)).view_as(o) for o in outputs]
        if split:
            rest = backward_input(outputs, grads, [x])
            assert {n for n, p in model.named_parameters() if p.grad is not None} == early
            assert x.grad is not None
            before = x.grad.clone()
            rest.run()
            assert torch.equal(before, x.grad)
        else:
            torch.autograd.backward(outputs, grads)
        found.append((x.grad, [p.grad for p in model.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


def test_the_second_half_does_not_compute_the_first_again() -> None:
    """The second half of a split backward pass, for weights, does not compute gradients of hidden states again."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.ones(2, 4, requires_grad=True)
    seen: list[str] = []
    hidden = model[1](model[0](x))
    hidden.register_hook(lambda grad: seen.append("hidden"))
    out = model[2](hidden)
    rest = backward_input([out], [torch.ones_like(out)], [x])
    assert seen == ["hidden"]
    rest.run()
    assert seen == ["hidden"]
    assert all(p.grad is not None for p in model.parameters())


def test_without_inputs_all_is_done_at_once() -> None:
    model = nn.Linear(4, 4)
    out = model(torch.ones(2, 4))
    backward_input([out], [torch.ones_like(out)], []).run()
    assert torch.equal(model.weight.grad, torch.full((4, 4), 2.0))
