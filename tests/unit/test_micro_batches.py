"""The micro-batches of a step are copied when they are read, whatever objects their labels consist of."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tds.batches import Batches
from tds.boundary import BoundaryError


@dataclass
class Labels:
    y: Tensor


KINDS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda y: y, lambda labels: labels),
    "array": (lambda y: y.numpy(), torch.from_numpy),
    "arrays in a list of dicts": (lambda y: [{"y": y.numpy()}], lambda labels: torch.from_numpy(labels[0]["y"])),
    "dataclass": (Labels, lambda labels: labels.y),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_iterator_may_reuse_the_memory_of_labels(kind: str) -> None:
    pack, unpack = KINDS[kind]
    buffer = torch.zeros(2)
    numbers = iter([1.0, 2.0, 3.0])

    def read() -> tuple[Tensor, Any]:
        buffer.fill_(next(numbers))
        return buffer, pack(buffer)

    batches = Batches(read, 3, torch.device("cpu"), 0, needs_inputs=True, needs_labels=True)
    expected = [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
    assert [unpack(labels).tolist() for labels in batches.all_labels()] == expected
    assert [unpack(batches.labels(micro)).tolist() for micro in range(3)] == expected
    assert [batches.inputs(micro).tolist() for micro in range(3)] == expected


def test_labels_that_cannot_be_copied_are_refused() -> None:
    labels = [threading.Lock()]
    batches = Batches(lambda: (torch.ones(1), labels), 1, torch.device("cpu"), 0, needs_inputs=True, needs_labels=True)
    with pytest.raises(BoundaryError, match="stage 0, labels of micro-batch 0: "):
        batches.all_labels()
