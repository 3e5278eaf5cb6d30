"""Layers with unusual behaviour: tuples of mixed dtypes, in-place operations, reused output memory, shared weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, VOCAB = 6, 11


def tensors_of(x: Any) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


class Start(nn.Module):
    """Layer: x [b, WIDTH] -> a tuple with a tensor for each word in `kinds`, or just the tensor for a single word."""

    def __init__(self, kinds: str) -> None:
        super().__init__()
        self.kinds, self.linear = kinds.split(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        numbers = torch.arange(x.numel(), device=x.device).view_as(x) % 3
        made: dict[str, Callable[[], Tensor]] = {
            "grad": lambda: y,
            "grad2": lambda: y.square(),
            "grad fp64": lambda: y.double(),
            "grad fp32": lambda: y.float(),
            "grad bf16": lambda: y.bfloat16(),
            "grad fp16": lambda: y.half(),
            "float": lambda: x.detach() * 2,  # needs no gradient, although it is floating-point
            "half": lambda: x.detach().half(),
            "int64": lambda: numbers,
            "int32": lambda: numbers.int(),
            "int16": lambda: numbers.short(),
            "uint8": lambda: numbers.to(torch.uint8),
            "bool": lambda: x.detach() > 0,
            "empty": lambda: x.new_empty(0, 3),
            "scalar": lambda: y.mean(),
            "complex64": lambda: torch.complex(x.detach().float(), x.detach().float()),
            "complex128": lambda: torch.complex(x.detach().double(), x.detach().double()).conj(),
        }
        out = tuple(made[kind.replace("_", " ")]() for kind in self.kinds)
        return out[0] if len(out) == 1 else out


def _size(t: Tensor) -> Tensor:
    return (t.abs() if t.is_complex() else t).double().sum()


class Middle(nn.Module):
    """Layer that transforms tensors with gradients and adds the sum of all other tensors, which it leaves unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Any) -> Any:
        tensors = tensors_of(inputs)
        rest = sum(_size(t) * 1e-2 for t in tensors if not t.requires_grad and t.numel())
        weight, bias = self.linear.weight, self.linear.bias
        out = tuple(
            torch.tanh(nn.functional.linear(t.to(weight.dtype).expand(*t.shape[:-1], WIDTH), weight, bias) + rest).to(
                t.dtype
            )
            if t.requires_grad and t.dim()
            else t
            for t in tensors
        )
        return out if isinstance(inputs, tuple) else out[0]


class Nothing(nn.Module):
    """Layer without parameters, which applies sin to the first tensor."""

    def forward(self, inputs: Any) -> Any:
        hidden, *rest = tensors_of(inputs)
        return (torch.sin(hidden), *rest) if rest else torch.sin(hidden)


class Embed(nn.Module):
    """First layer with integer input: token ids [b, s] -> (hidden [b, s, WIDTH], token ids)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, WIDTH))

    def forward(self, tokens: Tensor) -> Any:
        return nn.functional.embedding(tokens, self.weight), tokens.to(torch.int32)

    def scores(self, inputs: Any) -> Tensor:
        """Return the logits [b, s, v], computed with the embedding matrix. The tied last layer calls this method."""
        return nn.functional.linear(inputs[0], self.weight)


class Decoder(nn.Module):
    """Layer: (decoded, encoded, ...) -> the same tuple with a new `decoded`.

    The first Decoder of a model gets (encoded, ...) and adds `decoded` to the tuple.
    """

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first, self.own, self.cross = first, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Any) -> Any:
        decoded, encoded, *rest = (inputs[0].detach() * 0.5, *inputs) if self.first else inputs
        return torch.tanh(self.own(decoded) + self.cross(encoded)), encoded, *rest


class Joint(nn.Module):
    """Layer: (a, b, ...) -> (f(a, b), g(a, b), ...), so that a stage boundary has the gradients of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Any) -> Any:
        a, b, *rest = inputs
        return torch.tanh(self.a(a) * b), torch.tanh(self.b(b) + a), *rest


class Table(nn.Module):
    """Layer: (hidden, ...) -> (hidden, ..., weight), so that a later layer can use this layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, inputs: Any) -> Any:
        return *tensors_of(inputs), self.weight


class UseTable(nn.Module):
    """Layer: (hidden, weight of a Table) -> hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Any) -> Tensor:
        hidden, weight = inputs
        return torch.tanh(self.linear(hidden) * weight)


class End(nn.Module):
    """Last layer, which returns only the first floating-point tensor, so the loss ignores the other tensors."""

    def forward(self, inputs: Any) -> Tensor:
        return next(t for t in tensors_of(inputs) if t.is_floating_point() and t.dim())


class Widen(nn.Module):
    """Layer that adds a tensor to the tuple: (hidden, ids) -> (hidden, sin(hidden), ids)."""

    def forward(self, inputs: Any) -> Any:
        hidden, ids = inputs
        return hidden, torch.sin(hidden), ids


class Keep(nn.Module):
    """Layer: (hidden, ...) -> (hidden + tanh(inner(hidden)), ...)."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Any) -> Any:
        hidden, *rest = inputs
        return hidden + torch.tanh(self.inner(hidden)), *rest


class Gather(nn.Module):
    """Last layer, which adds 0.1 times the mean of each further tensor to the first tensor.

    It ignores empty tensors and tensors of integers. In training, it also ignores tensors without gradient.
    """

    def forward(self, inputs: Any) -> Tensor:
        first, *rest = (
            t
            for t in tensors_of(inputs)
            if t.is_floating_point() and t.numel() and (t.requires_grad or not torch.is_grad_enabled())
        )
        return first + sum(t.to(first.dtype).mean() * 0.1 for t in rest)


class InPlace(nn.Module):
    """Layer that modifies its input in place, as ReLU(inplace=True) does, before it computes its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Any) -> Any:
        hidden, *rest = tensors_of(inputs)
        hidden = hidden.mul_(1.5)
        hidden = self.linear(hidden.tanh_())
        return (hidden, *rest) if rest else hidden


class Counting(nn.Module):
    """Layer: (a, b, count) -> (a, b, count), where `count` is an integer tensor that is incremented in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Any) -> Any:
        a, b, count = inputs
        product = a * b  # autograd saves a and b, which must stay unchanged until the backward pass
        count.add_(1)
        return torch.tanh(self.linear(product + count.to(a.dtype) * 0.1)), torch.sin(b), count


class _Refill(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, into: Tensor) -> Tensor:  # type: ignore[override]
        into.copy_(x)
        return into.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None


class Static(nn.Module):
    """Layer whose output is the same memory for every micro-batch, like that of a captured CUDA graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.memory: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x.clone()))  # autograd saves the copy: the previous layer will overwrite x
        if self.memory is None or self.memory.shape != y.shape or self.memory.dtype != y.dtype:
            self.memory = torch.empty_like(y)
        return _Refill.apply(y, self.memory)  # type: ignore[no-any-return,no-untyped-call]


class Copy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


class Select(nn.Module):
    """Layer that drops rows whose sum is negative, except the first, so that its output shape depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        kept = x.detach().sum(1) > 0
        kept[0] = True
        return torch.sin(self.linear(x[kept])) + 0.3


class Unused(nn.Module):
    """Layer that returns its input and has a weight that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x
