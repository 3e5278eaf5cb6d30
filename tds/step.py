"""State of a stage during one step: a `Step`, with a `Microbatch` for each micro-batch in progress.

A `Microbatch` keeps tensors from the instruction that produces them until the instruction that uses them.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .batches import Batches
from .channel import BoundaryTensor
from .memory import alias
from .schedule import MicroChunk
from .split_backward import DeferredWeightGrads


@dataclass(eq=False)
class Microbatch:
    """One micro-batch on one chunk of this stage. Each field is emptied by the last instruction that uses it.

    received: the inputs, from RecvActivation to SendGrad, or to Forward in evaluation.
    to_send: the outputs, from Forward to SendActivation. Then their memory is freed unless autograd needs it.
    edges: autograd's graph edges of the outputs, or of the loss on the last virtual stage, from Forward to the backward
        pass.
    grads: gradients of the outputs, from RecvGrad to the backward pass.
    deferred: weight gradients, from BackwardInput to BackwardWeight.
    """

    received: list[BoundaryTensor] = field(default_factory=list)
    to_send: list[BoundaryTensor] = field(default_factory=list)
    edges: list[GradientEdge] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    deferred: DeferredWeightGrads | None = None

    @property
    def is_empty(self) -> bool:
        """True if all fields are empty."""
        tensors = self.received or self.to_send or self.edges or self.grads
        return not tensors and self.deferred is None

    @property
    def inputs_with_grad(self) -> list[BoundaryTensor]:
        """The inputs that need a gradient."""
        return [each for each in self.received if each.needs_grad]

    def keep_outputs(self, outputs: Sequence[Tensor], splits: Sequence[bool], is_bare: bool) -> None:
        """Keep the outputs until they are sent, and their graph edges until the backward pass.

        splits: whether each output is sent in slices. is_bare: whether the layer returned a tensor, not a tuple. In
        evaluation, an output may be a weight with requires_grad, but it has no gradient.
        """
        for output, is_split in zip(outputs, splits, strict=True):
            has_grad = torch.is_grad_enabled() and output.requires_grad
            self.to_send.append(BoundaryTensor(alias(output), has_grad, is_split, is_bare))
            if has_grad:
                self.edges.append(get_gradient_edge(output))

    def take_roots(self) -> tuple[list[GradientEdge], list[Tensor]]:
        """Return the roots of the backward pass, and their received gradients (an empty list if the root is a loss)."""
        edges = self.edges
        grads = self.grads
        self.edges = []
        self.grads = []
        return edges, grads


@dataclass(eq=False)
class Step:
    """One call of train_batch or eval_batch.

    scale: factor on the loss of each micro-batch before its backward pass, a scalar in fp64.
    microbatches: the state of each micro-batch on a chunk, created empty at first use.
    """

    batches: Batches
    compute_loss: bool
    scale: Tensor | float = 1.0
    microbatches: defaultdict[MicroChunk, Microbatch] = field(default_factory=lambda: defaultdict(Microbatch))
