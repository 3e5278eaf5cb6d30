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

Grads = Sequence[Tensor | None]
Weights = dict[Tensor, None]  # serves as a set that keeps its order
COMPILED, REENTRANT = "CompiledFunctionBackward", "CheckpointFunctionBackward"  # names of autograd's nodes


class Fork(NamedTuple):
    """A fork: an operation `node`, and those `weights` whose only use in the graph is through this operation."""

    node: Node
    weights: list[Tensor]


class DeferredWeightGrads:
    """The deferred half of a backward pass: the gradients of the weights."""

    def __init__(self) -> None:
        self._recorded: list[tuple[Fork, Grads]] = []

    def _record(self, fork: Fork, grads: Grads) -> None:
        """Record the gradients that arrive at a fork in the first pass."""
        self._recorded.append((fork, grads))

    def run(self) -> None:
        """Accumulate the gradients of the weights into their `.grad`. Call it once."""
        for fork, grads in self._recorded:
            # Start a backward pass at the outputs of the fork that have a gradient.
            edges = []
            start_grads = []
            for number, grad in enumerate(grads):
                if grad is not None:
                    edges.append(GradientEdge(fork.node, number))
                    start_grads.append(grad)
            # The recorded gradients have passed the hooks of this node's tensors, such as a hook that doubles them.
            # Here these hooks run again and change `start_grads`. The prehook runs after them and undoes this: autograd
            # continues with the gradients that the prehook returns.
            handle = fork.node.register_prehook(lambda _, recorded=tuple(grads): recorded)
            try:
                torch.autograd.backward(edges, start_grads, retain_graph=True, inputs=fork.weights)  # type: ignore[call-overload]
            finally:
                handle.remove()
        self._recorded = []


def backward_input(
    outputs: Sequence[Tensor] | Sequence[GradientEdge], grads: Grads, inputs: Sequence[Tensor]
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
    roots = []
    for output in outputs:
        edge = get_gradient_edge(output) if isinstance(output, Tensor) else output
        roots.append(edge.node)
    order = _children_first(roots)
    if any(node.name().startswith(REENTRANT) for node in order):
        warnings.warn(
            "a layer recomputes activations with a re-entrant torch.utils.checkpoint, so zb-h1 cannot defer weight "
            "gradients and is no faster than 1f1b: pass use_reentrant=False to the checkpoint",
            stacklevel=2,
        )
        torch.autograd.backward(outputs, grads)
        return deferred
    forks, undeferred_weights = _forks(roots, inputs, order)
    handles = [fork.node.register_prehook(partial(deferred._record, fork)) for fork in forks]
    try:
        torch.autograd.backward(outputs, grads, retain_graph=True, inputs=[*inputs, *undeferred_weights])
    finally:
        for handle in handles:
            handle.remove()
    return deferred


def _forks(roots: Sequence[Node], inputs: Sequence[Tensor], order: Sequence[Node]) -> tuple[list[Fork], list[Tensor]]:
    """Return the forks, and the weights whose gradients cannot be deferred, because no fork or several lead to them.

    order: all nodes, each after the nodes that its edges lead to.
    """
    nodes_to_inputs, weights_below = _find_paths(inputs, order)
    possible_forks = [node for node in order if node in nodes_to_inputs]
    # No fork leads to the weights of outputs that do not depend on the inputs, and a compiled layer is no fork.
    undeferred_nodes = [node for node in roots if node not in nodes_to_inputs]
    undeferred_nodes += [node for node in possible_forks if node.name().startswith(COMPILED)]

    # A weight can be deferred if exactly one fork leads to it.
    uses: Counter[Tensor] = Counter()  # weight -> number of forks that lead to it
    # Each of the undeferred nodes is counted twice, as if two forks led to its weights, so they are not deferred.
    for node in [*possible_forks, *undeferred_nodes, *undeferred_nodes]:
        uses.update(weights_below[node].keys())

    forks = []
    for node in possible_forks:
        fork_weights = [weight for weight in weights_below[node] if uses[weight] == 1]
        if fork_weights:
            forks.append(Fork(node, fork_weights))
    return forks, [weight for weight, count in uses.items() if count > 1]


def _find_paths(inputs: Sequence[Tensor], order: Sequence[Node]) -> tuple[set[Node], dict[Node, Weights]]:
    """Return the nodes from which a path leads to the inputs, and the weights below each node.

    The weights below a node are those to which it leads without passing a node that leads to the inputs.
    """
    input_leaves = set(inputs)
    nodes_to_inputs = set[Node]()
    weights_below = dict[Node, Weights]()
    for node in order:
        leaf = getattr(node, "variable", None)  # a path ends in a node of an input or a weight; others have none
        weights = Weights()
        if leaf in input_leaves:
            nodes_to_inputs.add(node)
        elif leaf is not None:
            weights[leaf] = None
        for child, _ in node.next_functions:
            if child in nodes_to_inputs:
                nodes_to_inputs.add(node)
            elif child is not None:
                weights |= weights_below[child]
        weights_below[node] = weights
    return nodes_to_inputs, weights_below


def _children_first(roots: Sequence[Node]) -> list[Node]:
    """Return all nodes of the graph, each after the nodes that its edges lead to."""
    order = []
    seen: set[Node] = set()
    # A node is pushed twice. Its second visit comes after all nodes that its edges lead to, and is marked True.
    stack: list[tuple[Node, bool]] = [(node, False) for node in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            for child, _ in node.next_functions:
                if child is not None and child not in seen:
                    stack.append((child, False))
    return order


class SplitBackward:
    """The handlers of a pipeline engine for the two halves of a split backward pass."""

    _step: Any
    _reduction: Any

    def _backward_input(self, instruction: Any) -> None:
        """Compute the gradients of a micro-batch's inputs, and keep what `_backward_weight` needs."""
        microbatch = self._step.microbatches[instruction.micro_chunk]
        roots, grads = microbatch.take_roots()
        if roots:  # else no output requires a gradient
            inputs = [each.tensor for each in microbatch.inputs_with_grad]
            with self._reduction.accumulating(instruction):
                # On the last stage the only root is the loss, a scalar, whose gradient is [None].
                microbatch.deferred = backward_input(roots, grads or [None], inputs)

    def _backward_weight(self, instruction: Any) -> None:
        """Compute the gradients of the weights that `_backward_input` has deferred for this micro-batch."""
        microbatch = self._step.microbatches[instruction.micro_chunk]
        deferred = microbatch.deferred
        microbatch.deferred = None
        if deferred:
            with self._reduction.accumulating(instruction):
                deferred.run()
