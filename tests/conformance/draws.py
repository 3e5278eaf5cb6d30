"""Random conformance cases, for combinations of layers and settings that cases.py misses."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from .cases import Case, CountedLoss, Tie, adamw, mean_loss, sgd
from .layers import (
    WIDTH,
    Counting,
    Gather,
    InPlace,
    Joint,
    Keep,
    Middle,
    Nothing,
    Select,
    Start,
    Static,
    Table,
    UseTable,
)

CARRIED = ("float", "half", "int64", "int32", "int16", "uint8", "bool", "empty", "scalar", "complex64", "complex128",
           "grad2", "grad_fp32", "grad_bf16", "grad_fp64")  # fmt: skip


@dataclass(frozen=True)
class Draw:
    """A random case, with the layout, schedule and layer partition in which it runs."""

    case: Case
    stages: int
    tensor: int
    replicas: int
    pipeline: dict[str, Any]
    cuts: str

    @property
    def world(self) -> int:
        return self.stages * self.tensor * self.replicas


def draw(number: int) -> Draw:
    """Return the random case with this number; a number always gives the same case."""
    rng = random.Random(number)
    layers, ties = _layers(rng)
    count = len(layers())
    stages = rng.choice([1, 2, 3, 4])
    tensor, replicas = rng.choice([(1, 1), (1, 1), (1, 2), (2, 1)] if stages < 3 else [(1, 1)])
    checkpoint = rng.choice([0, 0, 0, 1, 2]) if not _works_in_place(layers()) else 0
    schedule = rng.choice(["1f1b", "1f1b", "gpipe", "interleaved"] + ["zb-h1"] * (checkpoint == 0))
    if schedule == "interleaved" and (stages == 1 or count < 2 * stages):
        schedule = "1f1b"
    pipeline: dict[str, Any] = {"schedule": schedule}
    if schedule == "1f1b":
        pipeline["extra_warmup"] = rng.choice([0, 0, 1])
    micros, steps, dynamic = rng.choice([1, 2, 5, 6]), 3, any(isinstance(layer, Select) for layer in layers())
    kinds = {
        "same": [(4,) * micros] * steps,
        "by step": [(rng.randint(1, 5),) * micros for _ in range(steps)],
        "by micro-batch": [tuple(rng.randint(1, 5) for _ in range(micros)) for _ in range(steps)],
    }
    feed = rng.choice(["fresh", "refilled", "dataset"])
    rows = kinds[rng.choice(list(kinds)) if feed == "fresh" else "same"]
    case = Case(
        f"draw {number}",
        layers,
        loss=_sum_of_squares if dynamic else rng.choice([mean_loss, CountedLoss()]),
        ties=ties,
        rows=tuple(rows),
        clip=rng.choice([0.0, 0.05]),
        checkpoint=checkpoint,
        feed=feed,
        frozen=tuple(_frozen(rng, layers(), ties)),
        optimizer=rng.choice([sgd, sgd, adamw]),
        module={"dynamic_shape": True} if dynamic or rng.random() < 0.1 else {},
    )
    return Draw(case, stages, tensor, replicas, pipeline, _cuts(rng, count, stages * (1 + (schedule == "interleaved"))))


def _sum_of_squares(out: Any, labels: Any) -> Any:
    return (out - labels[:1]).square().mean()


def _layers(rng: random.Random) -> tuple[Callable[[], list[nn.Module]], tuple[tuple[int, Tie], ...]]:
    """Return a function that builds random layers, and (index, tie) for each layer that shares a module."""
    count = rng.randint(6, 9)
    style = rng.choice(["tuple", "tuple", "single", "joint", "counting", "table"])
    kinds = {"joint": "grad grad2", "counting": "grad grad2 int64"}.get(style, "grad")
    if style in ("tuple", "joint"):
        kinds = " ".join([kinds, *rng.sample(CARRIED, rng.randint(0, 5))])
    choice: dict[str, list[Callable[[], nn.Module]]] = {
        "tuple": [Middle, Middle, Nothing, _keep],
        "single": [Middle, InPlace, Static, Select, Nothing, _keep],
        "joint": [Joint],
        "counting": [Counting],
    }
    if style == "table":
        ties = tuple((i, Tie("table")) for i in range(1, count - 2, 2))

        def tables() -> list[nn.Module]:
            table = Table()
            middle = [layer for _ in ties for layer in (table, UseTable())]
            return [Start("grad"), *middle, Middle(), Gather()]

        return tables, ties
    made = [rng.choice(choice[style]) for _ in range(count - 2)]
    if style == "single":
        made = _possible(made)
    if style != "single" or rng.random() < 0.5:
        return lambda: [Start(kinds), *(make() for make in made), Gather()], ()
    places = sorted(rng.sample(range(1, count - 1), 2))

    def tied() -> list[nn.Module]:
        shared = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        return [Start(kinds), *(shared if i in places else make() for i, make in enumerate(made, 1)), Gather()]

    return tied, tuple((i, Tie("shared")) for i in places)


def _possible(made: list[Callable[[], nn.Module]]) -> list[Callable[[], nn.Module]]:
    """Return `made` without the combinations of layers that would be wrong even in one process.

    Either all layers are Static or none is: a Static layer overwrites its previous output, so the next layer must copy
    it, as Static layers do. InPlace never follows Middle, since it would modify the output of tanh, which autograd
    has saved.
    """
    if made[0] is Static:
        return [Static] * len(made)
    found: list[Callable[[], nn.Module]] = []
    for make in made:
        if make is Static:
            make = Nothing
        found.append(Middle if make is InPlace and found[-1:] == [Middle] else make)
    return found


def _keep() -> nn.Module:
    inner = Keep(nn.Linear(WIDTH, WIDTH))
    return _Unpacked(inner)


class _Unpacked(nn.Module):
    """A wrapper of a `Keep` layer that also accepts a single tensor instead of a tuple."""

    def __init__(self, inner: Keep) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Any) -> Any:
        out = tuple(self.inner(inputs if isinstance(inputs, tuple) else (inputs,)))
        return out if isinstance(inputs, tuple) else out[0]


def _works_in_place(layers: list[nn.Module]) -> bool:
    """Return whether any layer overwrites tensors in place, so that recomputation in torch would read wrong inputs."""
    return any(isinstance(layer, (InPlace, Counting, Static)) for layer in layers)


def _frozen(rng: random.Random, layers: list[nn.Module], ties: tuple[tuple[int, Tie], ...]) -> list[int]:
    """Return random indices of layers to freeze.

    The last three layers stay trainable. Layers that share a module are either all frozen or all trainable.
    """
    tied = {index for index, _ in ties}
    chosen = {i for i in range(len(layers) - 3) if rng.random() < 0.2} - tied
    if not any(isinstance(layer, Joint) for layer in layers):
        chosen -= {0}  # a frozen layer 0 outputs tensors without gradient, which Middle would return unchanged
    return sorted(chosen | (tied if tied and rng.random() < 0.3 else set()))


def _cuts(rng: random.Random, count: int, chunks: int) -> str:
    inner = sorted(rng.sample(range(1, count), chunks - 1))
    return ",".join(map(str, [0, *inner, count]))
