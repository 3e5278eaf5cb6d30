"""A backward pass in two: gradients of the inputs now, gradients of the weights later (Qi et al. 2023).

Autograd's graph is a tree of operations whose edges lead back to inputs and weights. An operation
is a fork where some of its edges lead to an input and others to weights alone, as a matrix product's
do. The first pass follows the ways to the inputs and notes what arrives at each fork; the second
starts from these notes and goes down the edges that were left out. Nothing is computed twice.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


class Fork(NamedTuple):
    """An operation, and the weights that are reached over it alone."""

    node: Node
    weights: list[Tensor]


class Rest:
    """What is left of a backward pass: the gradients of the weights."""

    def __init__(self) -> None:
        self._noted: list[tuple[Fork, Sequence[Tensor | None]]] = []
        self._roots: tuple[list[Tensor], list[Tensor | None], list[Tensor]] | None = None

    def run(self) -> None:
        """Add the gradients of the weights to their `.grad`; once."""
        if self._roots is not None:
            outputs, given, weights = self._roots
            torch.autograd.backward(outputs, given, inputs=weights)
        for fork, grads in self._noted:
            arrived = [(GradientEdge(fork.node, i), g) for i, g in enumerate(grads) if g is not None]
            torch.autograd.backward(  # type: ignore[call-overload]
                [edge for edge, _ in arrived], [g for _, g in arrived], retain_graph=True, inputs=fork.weights
            )
        self._noted, self._roots = [], None


def backward_input(outputs: Sequence[Tensor], grads: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> Rest:
    """Add the gradients of `inputs` to their `.grad`, and return what is left to do.

    outputs, grads: as for `torch.autograd.backward`. inputs: leaves. A weight that is used more
    than once gets its gradient here, since the ways to it cannot be told apart later; so do all
    weights if there are no inputs.
    """
    rest = Rest()
    if not inputs:
        torch.autograd.backward(outputs, grads)
        return rest
    forks, shared, beside = _forks([get_gradient_edge(t).node for t in outputs], inputs)

    def note(fork: Fork) -> Any:
        return lambda arrived: rest._noted.append((fork, arrived))

    handles = [fork.node.register_prehook(note(fork)) for fork in forks]
    try:
        torch.autograd.backward(outputs, grads, retain_graph=True, inputs=[*inputs, *shared])
    finally:
        for handle in handles:
            handle.remove()
    if beside:
        rest._roots = list(outputs), list(grads), beside
    return rest


def _forks(roots: Sequence[Node], inputs: Sequence[Tensor]) -> tuple[list[Fork], list[Tensor], list[Tensor]]:
    """The forks; the weights that several of them reach; and those that outputs reach without passing a fork."""
    wanted = {id(t) for t in inputs}
    order = _children_first(roots)
    leads = {node for node in order if id(getattr(node, "variable", None)) in wanted}
    below: dict[Node, dict[int, Tensor]] = {}  # weights below the nodes that do not lead to an input
    reached: dict[Node, dict[int, Tensor]] = {}
    for node in order:
        children = [child for child, _ in node.next_functions if child is not None]
        if node in leads or any(child in leads for child in children):
            leads.add(node)
        weight = getattr(node, "variable", None)
        found = {} if weight is None else {id(weight): weight}
        for child in children:
            if child not in leads:
                found |= below[child]
        (reached if node in leads else below)[node] = found
    beside = {key: w for node in roots if node not in leads for key, w in below[node].items()}
    uses: dict[int, int] = dict.fromkeys(beside, 1)
    for weights in reached.values():
        for key in weights.keys() - wanted:
            uses[key] = uses.get(key, 0) + 1
    every = {key: w for weights in (beside, *reached.values()) for key, w in weights.items() if key not in wanted}
    forks = [
        Fork(node, own)
        for node, weights in reached.items()
        if (own := [w for key, w in weights.items() if key not in wanted and uses[key] == 1])
    ]
    shared = [w for key, w in every.items() if uses[key] > 1]
    return forks, shared, [w for key, w in beside.items() if uses[key] == 1]


def _children_first(roots: Sequence[Node]) -> list[Node]:
    """Every node of the graph behind the nodes that it leads to."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(node, False) for node in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None and child not in seen]
    return order
