"""What layers like to pass to each other: lists of layers, each of which any pipeline must train like one process does."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, MICROS, STEPS, ROWS, VOCAB = 6, 6, 3, 4, 11
Batch = tuple[Any, Tensor]


def tensors_of(x: Any) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


class Start(nn.Module):
    """x -> a tuple of every kind of tensor."""

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
            "float": lambda: x.detach() * 2,  # no gradient comes back for it
            "half": lambda: x.detach().half(),
            "int64": lambda: numbers,
            "int32": lambda: numbers.int(),
            "int16": lambda: numbers.short(),
            "uint8": lambda: numbers.to(torch.uint8),
            "bool": lambda: x.detach() > 0,
            "empty": lambda: x.new_empty(0, 3),
            "scalar": lambda: y.mean(),
        }
        out = tuple(made[kind.replace("_", " ")]() for kind in self.kinds)
        return out[0] if len(out) == 1 else out


class Middle(nn.Module):
    """Uses all tensors, changes those with gradient, hands the others on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Any) -> Any:
        tensors = tensors_of(inputs)
        rest = sum(t.double().sum() * 1e-2 for t in tensors if not t.requires_grad and t.numel())
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
    """A layer without parameters."""

    def forward(self, inputs: Any) -> Any:
        hidden, *rest = tensors_of(inputs)
        return (torch.sin(hidden), *rest) if rest else torch.sin(hidden)


class Embed(nn.Module):
    """Tokens -> (hidden, token ids): the first layer has no float input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, WIDTH))

    def forward(self, tokens: Tensor) -> Any:
        return nn.functional.embedding(tokens, self.weight), tokens.to(torch.int32)

    def scores(self, inputs: Any) -> Tensor:
        """The other end of a tie."""
        return nn.functional.linear(inputs[0], self.weight)


class Decoder(nn.Module):
    """(encoded, mask) -> (decoded, encoded, mask): the tuple changes in the middle, and what is encoded is handed on."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first, self.own, self.cross = first, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Any) -> Any:
        decoded, encoded, *rest = (inputs[0].detach() * 0.5, *inputs) if self.first else inputs
        return torch.tanh(self.own(decoded) + self.cross(encoded)), encoded, *rest


class Joint(nn.Module):
    """(a, b) -> (a, b), each of which needs both: two gradients over every boundary."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Any) -> Any:
        a, b, *rest = inputs
        return torch.tanh(self.a(a) * b), torch.tanh(self.b(b) + a), *rest


class Table(nn.Module):
    """(hidden, ...) -> (hidden, ..., weight): hands out a weight, which the layer behind uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, inputs: Any) -> Any:
        return *tensors_of(inputs), self.weight


class UseTable(nn.Module):
    """(hidden, weight) -> hidden"""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Any) -> Tensor:
        hidden, weight = inputs
        return torch.tanh(self.linear(hidden) * weight)


class End(nn.Module):
    """To one tensor. What else arrives with a gradient does not reach the loss."""

    def forward(self, inputs: Any) -> Tensor:
        return next(t for t in tensors_of(inputs) if t.is_floating_point() and t.dim())


def mean_loss(out: Tensor, labels: Tensor) -> Tensor:
    return (out - labels).square().mean()


class CountedLoss:
    """Two named sums, and what to divide them by: the result must not depend on how the batch is cut."""

    def __call__(self, out: Tensor, labels: Tensor) -> dict[str, Tensor]:
        kept = labels > 0
        return {"fit": ((out - labels).square() * kept).sum(), "size": (out.square() * kept).sum() * 0.1}

    def count_targets(self, labels: Tensor) -> Tensor:
        return (labels > 0).sum()


def token_loss(scores: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


@dataclass(frozen=True)
class Tie:
    """A layer that shares its module with others of the same key. method: what is called of it, if not itself."""

    key: str
    method: str | None = None


@dataclass(frozen=True)
class Case:
    """layers: builds the modules, seeded. ties: by index of the layer. rows: of the micro-batches of each step."""

    name: str
    layers: Callable[[], list[nn.Module]]
    loss: Any = mean_loss
    ties: tuple[tuple[int, Tie], ...] = ()
    declared: tuple[tuple[str, list[Any]], ...] = ()
    rows: tuple[tuple[int, ...], ...] = ((ROWS,) * MICROS,) * STEPS
    clip: float = 0.0
    checkpoint: int = 0
    tokens: bool = False

    def build(self) -> list[nn.Module]:
        torch.manual_seed(3)
        return self.layers()

    def batches(self, step: int, dtype: torch.dtype) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(5 + step)
        for rows in self.rows[step]:
            if self.tokens:
                ids = torch.randint(VOCAB, (2, rows, 5), generator=generator)
                yield ids[0], ids[1]
            else:
                x, y = torch.randn(2, rows, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
                yield x, y


def _chain(kinds: str, middle: Callable[[], nn.Module] = Middle) -> Callable[[], list[nn.Module]]:
    return lambda: [Start(kinds), *(middle() for _ in range(7)), End()]


def _translation() -> list[nn.Module]:
    return [Start("grad bool"), Middle(), Middle(), *(Decoder(i == 0) for i in range(5)), End()]


def _tied() -> list[nn.Module]:
    embed, square = Embed(), Joint()
    extra = nn.Linear(WIDTH, WIDTH)
    return [embed, Widen(), square, Keep(extra), square, Joint(), Keep(extra), square, embed]


def _tables() -> list[nn.Module]:
    table = Table()
    return [Start("grad"), table, UseTable(), table, UseTable(), table, UseTable(), Middle(), End()]


class Widen(nn.Module):
    """(hidden, ids) -> (hidden, sine of it, ids)."""

    def forward(self, inputs: Any) -> Any:
        hidden, ids = inputs
        return hidden, torch.sin(hidden), ids


class Keep(nn.Module):
    """Changes the first tensor by the layer it wraps."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Any) -> Any:
        hidden, *rest = inputs
        return hidden + torch.tanh(self.inner(hidden)), *rest


def _case(kinds: str, **more: Any) -> Case:
    return Case(f"({kinds.replace(' ', ', ').replace('_', ' ')})", _chain(kinds), **more)


CASES: Sequence[Case] = (
    _case("grad"),
    _case("grad float"),
    _case("grad int64"),
    _case("int64 grad"),
    _case("grad bool float"),
    _case("grad grad2 int16 empty"),
    _case("grad half bool int64 float"),
    _case("grad_fp64 grad_fp32 grad_bf16 grad_fp16 int64 int32 int16 uint8 bool scalar"),
    Case("two gradients, (a, b) -> (a, b)", _chain("grad grad2", Joint)),
    Case("an encoder-decoder: the tuple changes in the middle", _translation),
    Case("tokens first, tied embedding and two more ties", _tied, loss=token_loss, tokens=True, ties=(
        (0, Tie("embed")), (8, Tie("embed", "scores")), (2, Tie("square")), (4, Tie("square")), (7, Tie("square")),
        (3, Tie("extra")), (6, Tie("extra")))),
    Case("a weight as an output, tied over stages", _tables, ties=tuple((i, Tie("table")) for i in (1, 3, 5))),
    Case("stages without parameters", lambda: [Start("grad bool"), *(Nothing() for _ in range(7)), End()]),
    Case("split over tensor-parallel ranks", _chain("grad grad2 bool"), declared=(
        ("_input_grad", [True, True, False]), ("_input_type", ["float", "float", "bool"]),
        ("_input_pipe_partitioned", [True, False, True])), rows=((3,) * MICROS,) * STEPS),
    Case("named losses per target", _chain("grad grad2"), loss=CountedLoss()),
    Case("clipping by the global norm", _chain("grad"), clip=0.05),
    Case("another size each step", _chain("grad bool"), rows=((4,) * MICROS, (7,) * MICROS, (1,) * MICROS)),
    Case("another size each micro-batch", _chain("grad bool"), rows=((1, 3, 2, 3, 5, 4),) * STEPS),
    Case("activation checkpointing every 2 layers", _chain("grad"), checkpoint=2),
)  # fmt: skip
