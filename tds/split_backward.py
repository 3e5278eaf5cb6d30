"""Split backward pass: gradients of the inputs now, gradients of the weights later (Qi et al. 2023).

Autograd's graph consists of operations whose edges lead back to inputs and weights. An operation is a fork if
some of its edges lead to an input and others only to weights, as in a matmul. The first pass follows the paths to
the inputs and records the gradients that arrive at each fork. The second pass starts from these gradients and follows
the edges that lead only to weights.

No gradient is computed twice, except by a custom `autograd.Function`: it runs in both passes, and its
`ctx.needs_input_grad` lists the inputs that need a gradient in either of them. Hooks on activations run in both, too. A
compiled layer computes all its gradients at once, so its weights get their gradients in the first pass. A re-entrant
checkpoint runs a nested backward pass, which torch allows only within an unsplit backward pass, so with such a
checkpoint no gradient is deferred.
"""

import warnings
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

COMPILED, REENTRANT = "CompiledFunctionBackward", "CheckpointFunctionBackward"  # names of autograd's nodes


class Fork(NamedTuple):
    """A fork: an operation `node`, and those `weights` whose only use in the graph is through this operation."""

    node: Node
    weights: list[Tensor]


class DeferredWeightGrads:
    """The deferred half of a backward pass: the gradients of the weights."""

    def __init__(self) -> None:
        self._noted: list[tuple[Fork, Sequence[Tensor | None]]] = []

    def run(self) -> None:
        """Accumulate the gradients of the weights into their `.grad`. Call it once."""
        for fork, grads in self._noted:
            arrived = [(GradientEdge(fork.node, i), g) for i, g in enumerate(grads) if g is not None]
            # Hooks on this node's tensors run again here; this prehook restores the gradients of the first pass.
            handle = fork.node.register_prehook(partial(_instead, tuple(grads)))
            try:
                torch.autograd.backward(  # type: ignore[call-overload]
                    [edge for edge, _ in arrived], [g for _, g in arrived], retain_graph=True, inputs=fork.weights
                )
            finally:
                handle.remove()
        self._noted = []


def _instead(noted: tuple[Tensor | None, ...], arrived: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return noted


def backward_input(
    outputs: Sequence[Tensor] | Sequence[GradientEdge], grads: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> DeferredWeightGrads:
    """Accumulate the gradients of `inputs` into their `.grad`, and return the deferred weight gradients.

    outputs: tensors, or graph edges that lead to them.
    grads: gradients of the outputs; None for a scalar.
    inputs: leaf tensors that need gradients.

    Some weights get their gradients at once: weights that are used more than once, because their uses cannot be
    separated later; weights of compiled layers; and weights of outputs that do not depend on `inputs`.
    """
    deferred = DeferredWeightGrads()
    if not inputs:
        torch.autograd.backward(outputs, grads)
        return deferred
    edges = [get_gradient_edge(out) if isinstance(out, Tensor) else out for out in outputs]
    order = _children_first([edge.node for edge in edges])
    if any(node.name().startswith(REENTRANT) for node in order):
        warnings.warn(
            "a layer recomputes activations with a re-entrant torch.utils.checkpoint, so zb-h1 cannot defer weight "
            "gradients and is no faster than 1f1b: pass use_reentrant=False to the checkpoint",
            stacklevel=2,
        )
        torch.autograd.backward(outputs, grads)
        return deferred
    forks, early = _forks([edge.node for edge in edges], inputs, order)

    def note(fork: Fork) -> Any:
        return lambda arrived: deferred._noted.append((fork, arrived))

    handles = [fork.node.register_prehook(note(fork)) for fork in forks]
    try:
        torch.autograd.backward(outputs, grads, retain_graph=True, inputs=[*inputs, *early])
    finally:
        for handle in handles:
            handle.remove()
    return deferred


def _forks(roots: Sequence[Node], inputs: Sequence[Tensor], order: Sequence[Node]) -> tuple[list[Fork], list[Tensor]]:
    """Return the forks, and the weights whose gradients cannot be deferred, because no fork or several lead to them.

    order: all nodes, each after the nodes that its edges lead to.
    """
    wanted = {id(t) for t in inputs}
    leads: set[Node] = set()  # nodes from which a path leads to the inputs
    below: dict[Node, dict[int, Tensor]] = {}  # weights that a node leads to without passing a node in `leads`
    for node in order:
        leaf = getattr(node, "variable", None)
        children = [child for child, _ in node.next_functions if child is not None]
        if id(leaf) in wanted or any(child in leads for child in children):
            leads.add(node)
        below[node] = {} if leaf is None or id(leaf) in wanted else {id(leaf): leaf}
        for child in children:
            if child not in leads:
                below[node] |= below[child]
    ways = [below[node] for node in order if node in leads]
    aside = [below[node] for node in roots if node not in leads]
    aside += [below[node] for node in order if node in leads and node.name().startswith(COMPILED)]
    uses = Counter(key for weights in (*ways, *aside, *aside) for key in weights)
    forks = [
        Fork(node, own)
        for node in order
        if node in leads and (own := [weight for key, weight in below[node].items() if uses[key] == 1])
    ]
    early = {key: weight for weights in (*ways, *aside) for key, weight in weights.items() if uses[key] > 1}
    return forks, list(early.values())


def _children_first(roots: Sequence[Node]) -> list[Node]:
    """Return all nodes of the graph, each after the nodes that its edges lead to."""
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
