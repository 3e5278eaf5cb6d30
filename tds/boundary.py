"""Declarations and checks of the tensors that a pipeline stage sends to the next one.

A stage sends a tuple of tensors. Declaring them is optional: dtypes, shapes and gradient flags are read from the
tensors and sent with them. A declaration adds a check, and its flag `split` saves bandwidth.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

KINDS = ("float", "int", "bool")


class BoundaryError(RuntimeError):
    """A stage output that cannot be sent or differs from its declaration; the message names stage and tensor."""


@dataclass(frozen=True)
class Boundary:
    """The declaration of one tensor at a stage boundary.

    name: used in error messages.
    kind: `float`, `int` or `bool`.
    grad: whether the next stage sends a gradient back.
    split: the tensor is equal on all t tensor-parallel ranks, so each of them sends 1/t of it, and the receiving
        ranks all-gather it.
    """

    name: str
    kind: str = "float"
    grad: bool = True
    split: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BoundaryError(f"boundary tensor {self.name!r}: kind {self.kind!r} is not one of {', '.join(KINDS)}")
        if self.grad and self.kind != "float":
            raise BoundaryError(
                f"boundary tensor {self.name!r} is {self.kind}, so it cannot have a gradient; declare grad=False"
            )


def kind_of(tensor: Tensor) -> str:
    """Return the kind of a tensor's dtype, as in `Boundary.kind`: `float` (also if complex), `int` or `bool`."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return "float"
    return "bool" if str(tensor.dtype) == "torch.bool" else "int"


Tensors = tuple[Boundary, ...] | None  # the declaration of one stage boundary; None: not declared


@dataclass(frozen=True)
class Contract:
    """A stage's boundary declarations, which the stages exchange before the first step.

    puts_out, takes_in: declared outputs and inputs, one item per chunk.
    settings: settings that must be equal on all stages.
    """

    puts_out: tuple[Tensors, ...]
    takes_in: tuple[Tensors, ...]
    settings: dict[str, Any]


def contract_of(model: Any, chunks: int, settings: dict[str, Any]) -> Contract:
    """Return the declarations of `model`: its `boundaries` (outputs) and `receives` (inputs).

    Both attributes are optional; with several chunks, each holds one sequence per chunk. A missing attribute is read
    from the three parallel lists that models for CPM-Pretrain's TDS have, if they are there: `_input_grad`,
    `_input_type` and `_input_pipe_partitioned`, with one item per tensor.
    """
    legacy = _legacy(model)
    ends: list[tuple[Tensors, ...]] = []
    for name in ("boundaries", "receives"):
        given = getattr(model, name, None)
        if given is None:
            ends.append((legacy,) * chunks)
        elif chunks == 1:
            ends.append((tuple(given),))
        else:
            ends.append(tuple(None if each is None else tuple(each) for each in given))
    return Contract(ends[0], ends[1], settings)


def _legacy(model: Any) -> Tensors:
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


def check_match(contracts: Sequence[Contract]) -> None:
    """Raise the same BoundaryError on every stage unless settings and declarations match. contracts: one per stage."""
    stages = len(contracts)
    for stage, contract in enumerate(contracts):
        for key, value in contract.settings.items():
            if contracts[0].settings.get(key) != value:
                raise BoundaryError(
                    f"stage {stage} runs with {key} = {value}, stage 0 with {contracts[0].settings.get(key)}; "
                    f"give all ranks the same configuration"
                )
    chunks = len(contracts[0].puts_out)
    for virtual_stage in range(stages * chunks - 1):
        here = virtual_stage % stages
        there = (virtual_stage + 1) % stages
        put = contracts[here].puts_out[virtual_stage // stages]
        taken = contracts[there].takes_in[(virtual_stage + 1) // stages]
        if put is None or taken is None:
            continue
        names = [", ".join(each.name for each in end) for end in (taken, put)]
        if len(put) != len(taken):
            raise BoundaryError(
                f"stage {there} expects {len(taken)} tensors ({names[0]}) from stage {here}, which outputs "
                f"{len(put)} ({names[1]})"
            )
        for expected, got in zip(taken, put, strict=True):
            if expected != got:
                raise BoundaryError(f"stage {there} expects {expected} from stage {here}, which outputs {got}")


def check_sendable(tensors: Sequence[Any], who: str, device: torch.device | None = None) -> None:
    """Raise BoundaryError for a non-tensor, or a tensor that is not dense or not on `device` (if given).

    who: beginning of the message, e.g. `stage 0, outputs`.
    """
    if not tensors:
        raise BoundaryError(f"{who}: there are no tensors to send; return at least one tensor")
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise BoundaryError(
                f"{who}: tensor {i} is {type(tensor).__name__}; only tensors can be sent, so leave it out or "
                f"convert it to a tensor"
            )
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
            raise BoundaryError(f"{who}: tensor {i} is {kind}; make it dense (to_dense(), to_padded_tensor())")
        if device is not None and tensor.device.type != device.type:
            raise BoundaryError(
                f"{who}: tensor {i} is on {tensor.device}, but the stage is on {device}; move it to the stage's device"
            )


def check(tensors: tuple[Any, ...], declared: Tensors, who: str, device: torch.device | None = None) -> None:
    """Raise BoundaryError if a tensor cannot be sent or differs from its declaration.

    who: beginning of the message, e.g. `stage 0, outputs`.
    """
    check_sendable(tensors, who, device)
    if declared is None:
        return
    if len(tensors) != len(declared):
        names = ", ".join(each.name for each in declared)
        raise BoundaryError(f"{who}: got {len(tensors)} tensors, but {len(declared)} are declared: {names}")
    for tensor, each in zip(tensors, declared, strict=True):
        if kind_of(tensor) != each.kind:
            raise BoundaryError(f"{who}: {each.name!r} is declared {each.kind}, got {tensor.dtype}")
        if tensor.requires_grad and not each.grad:
            raise BoundaryError(
                f"{who}: {each.name!r} is declared without gradient but has one; "
                f"declare grad=True or detach it, or the layers before it will not be trained"
            )
