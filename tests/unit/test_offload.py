"""Tests of activation offloading on a CPU; a stand-in delays copies, like the asynchronous copies of a GPU."""

import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from megatron.config.command_line import parse
from megatron.model import GPT2Model, T5Model, offload
from megatron.model.offload import CopyStreams, OffloadedStorage, PendingCopy, offloaded
from tds.split_backward import backward_input

SIZES = "--hidden-size 16 --num-attention-heads 2 --vocab-size 40 --hidden-dropout 0 --attention-dropout 0"
MODELS = {
    "gpt2": f"{SIZES} --num-layers 3 --seq-length 8",
    "t5": f"{SIZES} --num-layers 2 --family t5 --enc-seq-length 8 --dec-seq-length 8 --position-embedding relative "
    "--normalization rmsnorm --activation gated-gelu",
}


class LateStream:
    """A stand-in for a device's copy stream, which performs a copy only when some code waits for this copy."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def _late(self, source: Tensor, first: Callable[[], None]) -> PendingCopy:
        result = torch.full_like(source, 251)
        self.log.append(f"{self.name} {source.numel()}")
        todo = [0]

        def wait() -> None:
            if todo:
                todo.pop()
                first()
                result.copy_(source)

        return PendingCopy(result, wait)

    def to_host(self, source: Tensor) -> PendingCopy:
        return self._late(source, lambda: None)

    def to_device(self, source: PendingCopy) -> PendingCopy:
        return self._late(source.result, source.wait)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A log of copies: "down 96" is 96 bytes to the CPU, "up 96" the way back. Tests may append other entries."""
    told: list[str] = []
    late = CopyStreams.__new__(CopyStreams)
    late.down, late.up, late.last = LateStream("down", told), LateStream("up", told), None  # type: ignore[assignment]
    monkeypatch.setattr(offload, "copy_streams", lambda _: late)
    monkeypatch.setattr(offload, "_is_accelerator", lambda _: True)
    monkeypatch.setattr(offload, "MIN_BYTES", 0)
    yield told


@pytest.mark.parametrize("model", ["gpt2", "t5"])
def test_activations_come_back_as_they_were(model: str, log: list[str]) -> None:
    found = []
    for more in ("", "--offload-activations"):
        settings = parse(f"{MODELS[model]} {more}".split())
        net = (T5Model if settings.is_t5 else GPT2Model)(settings).train()
        tokens = torch.arange(40).view(5, 8)  # No activation of 5 x 8 tokens is as large as a weight.
        loss = net(*([tokens, tokens] if settings.is_t5 else [tokens]), labels=tokens.flip(1)).sum()
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in net.parameters())])
        assert bool(log) == bool(more)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    weights = {p.numel() * 4 for p in net.parameters() if p.dim() > 1}
    assert not weights & {int(line.split()[1]) for line in log}, "weights stay"


def test_memory_that_several_look_into_goes_once(log: list[str]) -> None:
    """Memory that several saved tensors share, such as views of one QKV output, is transferred once."""
    x = torch.randn(4, 6, requires_grad=True)
    with offloaded():
        product = x * 2
        q, k, v = product.split(2, dim=1)
        out = (q * k).sum() + (v * q).sum()
    assert log == ["down 96"], "4 x 6 numbers of 4 bytes"
    out.backward()
    assert log == ["down 96", "up 96"]
    whole = x.detach().clone().requires_grad_()
    q, k, v = (whole * 2).split(2, dim=1)
    ((q * k).sum() + (v * q).sum()).backward()
    assert x.grad is not None and whole.grad is not None
    assert torch.equal(x.grad, whole.grad)


def test_the_layer_before_is_fetched_while_one_works(log: list[str]) -> None:
    x = torch.randn(3, requires_grad=True)
    hidden = x
    for size in (1, 2, 3):
        with offloaded():
            hidden = torch.cat([hidden, hidden.new_ones(1)]).exp()
        hidden.register_hook(lambda _, size=size: log.append(f"layer {size}"))  # type: ignore[no-untyped-call]
    assert log == ["down 16", "down 20", "down 24"]
    hidden.sum().backward()
    assert log[3:] == ["layer 3", "up 24", "up 20", "layer 2", "up 16", "layer 1"]


def test_memory_is_let_go_and_comes_again_for_a_second_pass(log: list[str]) -> None:
    """Offloaded memory is fetched again for a second backward pass, as in schedules with a split backward."""
    weight, x = nn.Parameter(torch.randn(2, 2)), torch.randn(2, 2, requires_grad=True)
    with offloaded():
        y = (x * 1) @ weight.clone()
    (to_x,) = torch.autograd.grad(y.sum(), [x], retain_graph=True)
    (to_weight,) = torch.autograd.grad(y.sum(), [weight])
    assert torch.allclose(to_x, torch.ones(2, 2) @ weight.T) and torch.allclose(to_weight, x.T @ torch.ones(2, 2))
    storage = torch.ones(4).untyped_storage()
    memory = OffloadedStorage(storage, offload.copy_streams(torch.device("cpu")))
    memory.unrequested |= {0, 1}
    in_backward = len(log)
    memory.request(0)
    memory.request(1)
    assert len(log) == in_backward + 1
    memory.request(1)
    assert len(log) == in_backward + 2


def test_what_changes_on_its_way_is_an_error(log: list[str]) -> None:
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="--offload-activations"), offloaded():
        y = x * 2
        (y * y).sum()
        y.add_(1)


@pytest.mark.parametrize("split", [False, True])
def test_tensors_that_stay_are_freed_after_the_backward_pass(split: bool) -> None:
    """Tanh saves its output. The halves of a split backward pass retain the graph, so nothing else breaks a cycle."""
    inputs = torch.randn(3, 4, requires_grad=True)
    weight = nn.Parameter(torch.randn(4, 4))
    with offloaded():
        hidden = (inputs @ weight).tanh()
        loss = (hidden**2).sum()
    alive = weakref.ref(hidden)
    if split:
        backward_input([loss], [None], [inputs]).run()
    else:
        loss.backward()
    expected = 2 * hidden.detach() * (1 - hidden.detach() ** 2)
    torch.testing.assert_close(weight.grad, inputs.detach().t() @ expected)
    del hidden, loss
    assert alive() is None
