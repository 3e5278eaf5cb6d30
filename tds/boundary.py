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

    outputs, inputs: declared outputs and inputs, one item per chunk.
    settings: settings that must be equal on all stages.
    """

    outputs: tuple[Tensors, ...]
    inputs: tuple[Tensors, ...]
    settings: dict[str, Any]


def contract_of(model: Any, chunks: int, settings: dict[str, Any]) -> Contract:
    """Return the declarations of `model`: its `boundaries` (outputs) and `receives` (inputs).

    Both attributes are optional; with several chunks, each holds one sequence per chunk. A missing attribute is read
    from the three parallel lists that models for CPM-Pretrain's TDS have, if they are there: `_input_grad`,
    `_input_type` and `_input_pipe_partitioned`, with one item per tensor.
    """
    outputs = _declared(model, "boundaries", chunks)
    return Contract(outputs, _declared(model, "receives", chunks), settings)


def _declared(model: Any, name: str, chunks: int) -> tuple[Tensors, ...]:
    """Return the declarations in attribute `name` of a model, one item per chunk."""
    given = getattr(model, name, None)
    if given is None:
        return (_legacy(model),) * chunks
    if chunks == 1:
        return (tuple(given),)
    return tuple(None if each is None else tuple(each) for each in given)


def _legacy(model: Any) -> Tensors:
    """Return the declarations in the three parallel lists of a model for CPM-Pretrain's TDS, or None without them."""
    given: dict[str, Sequence[Any]] = {}
    for name in ("_input_grad", "_input_type", "_input_pipe_partitioned"):
        value = getattr(model, name, None)
        if value is not None:
            given[name] = value
    if not given:
        return None
    lengths = {len(value) for value in given.values()}
    if len(lengths) > 1:
        described = ", ".join(f"{name} has {len(value)}" for name, value in given.items())
        raise BoundaryError(f"the lists that declare the pipeline boundary differ in length: {described}")
    count = lengths.pop()
    kinds = given.get("_input_type") or ["float"] * count
    grads = given.get("_input_grad") or [kind == "float" for kind in kinds]
    splits = given.get("_input_pipe_partitioned") or [False] * count
    found = []
    for i in range(count):
        found.append(Boundary(f"tensor {i}", kinds[i], grads[i], splits[i]))
    return tuple(found)


def check_match(contracts: Sequence[Contract]) -> None:
    """Raise the same BoundaryError on every stage unless settings and declarations match. contracts: one per stage."""
    first = contracts[0]
    for stage, contract in enumerate(contracts):
        for key, value in contract.settings.items():
            if first.settings.get(key) != value:
                raise BoundaryError(
                    f"stage {stage} runs with {key} = {value}, stage 0 with {first.settings.get(key)}; "
                    f"give all ranks the same configuration"
                )
    stages = len(contracts)
    for virtual_stage in range(stages * len(first.outputs) - 1):
        chunk, here = divmod(virtual_stage, stages)
        next_chunk, there = divmod(virtual_stage + 1, stages)
        sent = contracts[here].outputs[chunk]
        taken = contracts[there].inputs[next_chunk]
        if sent is not None and taken is not None:
            _check_ends(sent, taken, here, there)


def _check_ends(sent: Sequence[Boundary], taken: Sequence[Boundary], here: int, there: int) -> None:
    """Raise BoundaryError unless what stage `here` outputs is what stage `there` expects."""
    if len(sent) != len(taken):
        raise BoundaryError(
            f"stage {there} expects {len(taken)} tensors ({_names(taken)}) from stage {here}, which outputs "
            f"{len(sent)} ({_names(sent)})"
        )
    for expected, got in zip(taken, sent, strict=True):
        if expected != got:
            raise BoundaryError(f"stage {there} expects {expected} from stage {here}, which outputs {got}")


def _names(declared: Sequence[Boundary]) -> str:
    return ", ".join(each.name for each in declared)


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
        raise BoundaryError(f"{who}: got {len(tensors)} tensors, but {len(declared)} are declared: {_names(declared)}")
    for tensor, each in zip(tensors, declared, strict=True):
        if kind_of(tensor) != each.kind:
            raise BoundaryError(f"{who}: {each.name!r} is declared {each.kind}, got {tensor.dtype}")
        if tensor.requires_grad and not each.grad:
            raise BoundaryError(
                f"{who}: {each.name!r} is declared without gradient but has one; "
                f"declare grad=True or detach it, or the layers before it will not be trained"
            )
