"""What crosses from one stage to the next: a tuple of tensors, each declared by name.

Declaring is optional: dtypes, shapes and gradients are read off the tensors themselves and
travel with them. A declaration adds a check, and `split` saves bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

KINDS = ("float", "int", "bool")


class BoundaryError(RuntimeError):
    """What a stage puts out is not what was declared or can be carried; the message names stage and tensor."""


@dataclass(frozen=True)
class Boundary:
    """One tensor of the tuple.

    name: for messages. kind: `float`, `int` or `bool`. grad: a gradient comes back for it.
    split: it is the same on all tensor-parallel ranks, so each carries 1/t of it over the
    boundary and they gather it on arrival.
    """

    name: str
    kind: str = "float"
    grad: bool = True
    split: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BoundaryError(f"boundary tensor {self.name!r}: kind {self.kind!r} is not one of {', '.join(KINDS)}")
        if self.grad and self.kind != "float":
            raise BoundaryError(f"boundary tensor {self.name!r} is {self.kind}, so it cannot have a gradient")


def kind_of(tensor: Tensor) -> str:
    if tensor.dtype.is_floating_point:
        return "float"
    return "bool" if str(tensor.dtype) == "torch.bool" else "int"


def boundaries_of(model: Any) -> tuple[Boundary, ...] | None:
    """The declaration of `model`: its `boundaries`, or the three lists of the original TDS.

    `_input_grad`, `_input_type` and `_input_pipe_partitioned` are parallel lists with one item
    per tensor. None where the model declares nothing.
    """
    declared = getattr(model, "boundaries", None)
    if declared is not None:
        return tuple(declared)
    lists = {name: getattr(model, name, None) for name in ("_input_grad", "_input_type", "_input_pipe_partitioned")}
    given: dict[str, Sequence[Any]] = {name: value for name, value in lists.items() if value is not None}
    if not given:
        return None
    lengths = {name: len(value) for name, value in given.items()}
    if len(set(lengths.values())) > 1:
        described = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise BoundaryError(f"the lists that declare the pipeline boundary differ in length: {described}")
    count = next(iter(lengths.values()))
    kinds = given.get("_input_type") or ["float"] * count
    grads = given.get("_input_grad") or [kind == "float" for kind in kinds]
    splits = given.get("_input_pipe_partitioned") or [False] * count
    return tuple(
        Boundary(f"tensor {i}", kind, grad, split)
        for i, (kind, grad, split) in enumerate(zip(kinds, grads, splits, strict=True))
    )


def check(outputs: tuple[Tensor, ...], declared: tuple[Boundary, ...] | None, stage: int) -> None:
    """Raise BoundaryError if what `stage` puts out differs from the declaration."""
    for i, tensor in enumerate(outputs):
        if not isinstance(tensor, Tensor):
            raise BoundaryError(f"stage {stage}: output {i} is {type(tensor).__name__}; only tensors cross a boundary")
    if declared is None:
        return
    if len(outputs) != len(declared):
        names = ", ".join(each.name for each in declared)
        raise BoundaryError(f"stage {stage} puts out {len(outputs)} tensors, declared are {len(declared)}: {names}")
    for tensor, each in zip(outputs, declared, strict=True):
        if kind_of(tensor) != each.kind:
            raise BoundaryError(f"stage {stage}: {each.name!r} is declared {each.kind}, got {tensor.dtype}")
        if tensor.requires_grad and not each.grad:
            raise BoundaryError(
                f"stage {stage}: {each.name!r} is declared without gradient but has one; "
                f"declare grad=True or detach it, or what lies before it will not learn"
            )
