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
    return "bool" if tensor.dtype is torch.bool else "int"


Declared = tuple[Boundary, ...] | None  # the declaration of one stage boundary; None: not declared


@dataclass(frozen=True)
class Contract:
    """A stage's boundary declarations, which the stages exchange before the first step.

    outputs, inputs: declared outputs and inputs, one item per chunk.
    settings: settings that must be equal on all stages.
    """

    outputs: tuple[Declared, ...]
    inputs: tuple[Declared, ...]
    settings: dict[str, Any]


def read_contract(model: Any, chunks: int, settings: dict[str, Any]) -> Contract:
    """Return the declarations of `model`: its `boundaries` (outputs) and `receives` (inputs).

    Both attributes are optional; with several chunks, each holds one sequence per chunk. A missing attribute is read
    from the three parallel lists that models for CPM-Pretrain's TDS have, if they are there: `_input_grad`,
    `_input_type` and `_input_pipe_partitioned`, with one item per tensor.
    """
    outputs = _read_declarations(model, "boundaries", chunks)
    inputs = _read_declarations(model, "receives", chunks)
    return Contract(outputs, inputs, settings)


def _read_declarations(model: Any, name: str, chunks: int) -> tuple[Declared, ...]:
    """Return the declarations in attribute `name` of a model, one item per chunk."""
    declared = getattr(model, name, None)
    if declared is None:
        return (_legacy_declaration(model),) * chunks
    if chunks == 1:
        return (tuple(declared),)
    return tuple(None if each is None else tuple(each) for each in declared)  # None: not declared


def _legacy_declaration(model: Any) -> Declared:
    """Return the declarations in the three parallel lists of a model for CPM-Pretrain's TDS, or None without them."""
    lists: dict[str, Sequence[Any]] = {}
    for name in ("_input_grad", "_input_type", "_input_pipe_partitioned"):
        value = getattr(model, name, None)
        if value is not None:
            lists[name] = value
    if not lists:
        return None
    lengths = set(map(len, lists.values()))
    if len(lengths) > 1:
        description = ", ".join(f"{name} has {len(value)}" for name, value in lists.items())
        raise BoundaryError(f"the lists that declare the pipeline boundary differ in length: {description}")
    count = lengths.pop()  # the only length
    # Without the other lists, all tensors are of floats, all tensors of floats have gradients, and none is split.
    kinds = lists.get("_input_type") or ["float"] * count
    grads = lists.get("_input_grad") or [kind == "float" for kind in kinds]
    splits = lists.get("_input_pipe_partitioned") or [False] * count
    return tuple(Boundary(f"tensor {i}", kinds[i], grads[i], splits[i]) for i in range(count))


def check_match(contracts: Sequence[Contract]) -> None:
    """Raise the same BoundaryError on every stage unless settings and declarations match. contracts: one per stage."""
    first = contracts[0]
    for stage, contract in enumerate(contracts):
        for key, value in contract.settings.items():
            if first.settings.get(key) != value:
                raise BoundaryError(
                    f"stage {stage} runs with {key} = {value}, stage 0 with {first.settings.get(key)}; "
                    f"give all ranks the same configuration and list of layers"
                )
    stages = len(contracts)
    # Virtual stage v is chunk v // stages of stage v % stages, and its outputs go to virtual stage v + 1. For example,
    # with 2 stages of 2 chunks each, chunk 0 of stage 1 is virtual stage 1, which sends to chunk 1 of stage 0.
    for virtual_stage in range(stages * len(first.outputs) - 1):
        chunk, sender = divmod(virtual_stage, stages)
        next_chunk, receiver = divmod(virtual_stage + 1, stages)
        outputs = contracts[sender].outputs[chunk]
        inputs = contracts[receiver].inputs[next_chunk]
        if outputs is not None and inputs is not None:
            _check_ends(outputs, inputs, sender, receiver)


def _check_ends(outputs: Sequence[Boundary], inputs: Sequence[Boundary], sender: int, receiver: int) -> None:
    """Raise BoundaryError unless what stage `sender` outputs is what stage `receiver` expects."""
    if len(outputs) != len(inputs):
        raise BoundaryError(
            f"stage {receiver} expects {len(inputs)} tensors ({_names(inputs)}) from stage {sender}, which outputs "
            f"{len(outputs)} ({_names(outputs)})"
        )
    for expected, got in zip(inputs, outputs, strict=True):
        if expected != got:
            raise BoundaryError(f"stage {receiver} expects {expected} from stage {sender}, which outputs {got}")


def _names(declared: Sequence[Boundary]) -> str:
    """Return the names of declared tensors for a message."""
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
            kind = str(tensor.layout)
            if tensor.is_quantized:
                kind = "quantized"
            elif tensor.is_nested:
                kind = "nested"
            raise BoundaryError(f"{who}: tensor {i} is {kind}; make it dense (to_dense(), to_padded_tensor())")
        if device is not None and tensor.device.type != device.type:
            raise BoundaryError(
                f"{who}: tensor {i} is on {tensor.device}, but the stage is on {device}; move it to the stage's device"
            )


def check_tensors(tensors: tuple[Any, ...], declared: Declared, who: str, device: torch.device | None = None) -> None:
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
