"""The micro-batches of a step are copied when they are read, whatever objects their labels consist of."""

import random
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


def test_the_end_of_a_run_of_equal_shapes_is_found_in_any_order() -> None:
    """`run_end` depends neither on the order of its calls nor on when the micro-batches are read."""
    dice = random.Random(0)
    sizes = [size for size in (1, 2, 1, 3) for _ in range(dice.randint(1, 40))]
    following = iter(sizes)
    batches = Batches(lambda: (torch.zeros(next(following)), None), len(sizes), torch.device("cpu"), 0, True, False)
    for micro in range(len(sizes)):  # as in training: some later micro-batches are read already
        batches.read_to(micro + 1)
        batches.prefetch(micro + dice.randint(1, 20))
        known = sizes[: batches.count]
        assert batches.run_end(micro) == _run_end(known, micro)
    order = list(range(len(sizes)))
    dice.shuffle(order)
    assert [batches.run_end(micro) for micro in order] == [_run_end(sizes, micro) for micro in order]


def _run_end(sizes: list[int], micro: int) -> int:
    return next((n for n in range(micro, len(sizes)) if sizes[n] != sizes[micro]), len(sizes))
