"""What a stage keeps while one step lasts: of the step as a whole, and of each micro-batch between its instructions."""

from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import GradientEdge

from .batches import Batches
from .channel import BoundaryTensor
from .schedule import At
from .split_backward import DeferredWeightGrads


@dataclass(eq=False)
class Microbatch:
    """One micro-batch on one chunk of this stage; each field is empty again when the instruction that wants it has run.

    received: the inputs, from RecvActivation to SendGrad (in evaluation to Forward). to_send: the outputs, from Forward
    to SendActivation; they are not kept any longer, so their memory is free then unless autograd needs it. edges: where the
    gradients of the outputs go into autograd's graph, from Forward to the backward pass; grads: these gradients, from
    RecvGrad to there. loss: a scalar to learn from, where there is no next stage. deferred: from BackwardInput to
    BackwardWeight.
    """

    received: list[BoundaryTensor] = field(default_factory=list)
    to_send: list[BoundaryTensor] = field(default_factory=list)
    edges: list[GradientEdge] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    loss: Tensor | None = None
    deferred: DeferredWeightGrads | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing of it is kept any more."""
        kept = self.received or self.to_send or self.edges or self.grads
        return not kept and self.loss is None and self.deferred is None

    @property
    def inputs_that_learn(self) -> list[BoundaryTensor]:
        """Those that a gradient goes back through."""
        return [each for each in self.received if each.grad]

    def take_received(self) -> list[BoundaryTensor]:
        """What came in, which is forgotten here."""
        received, self.received = self.received, []
        return received

    def take_to_send(self) -> list[BoundaryTensor]:
        """What goes out, which is forgotten here."""
        to_send, self.to_send = self.to_send, []
        return to_send

    def take_roots(self) -> tuple[list[Tensor] | list[GradientEdge], list[Tensor]]:
        """What to differentiate, and the gradients that came for it (none for a loss)."""
        if self.loss is not None:
            loss, self.loss = self.loss, None
            return [loss], []
        edges, grads, self.edges, self.grads = self.edges, self.grads, [], []
        return edges, grads


@dataclass(eq=False)
class Step:
    """One call of train_batch or eval_batch. scale: what the sum of losses of a micro-batch is multiplied by, a scalar in fp64."""

    batches: Batches
    compute_loss: bool
    scale: Tensor | float = 1.0
    microbatches: dict[At, Microbatch] = field(default_factory=dict)

    def of(self, at: At) -> Microbatch:
        """What is kept of a micro-batch on a chunk; nothing at first."""
        found = self.microbatches.get(at)
        if found is None:
            found = self.microbatches[at] = Microbatch()
        return found

    def forget_if_done(self, at: At) -> None:
        """After an instruction: let go of what nothing is kept of."""
        found = self.microbatches.get(at)
        if found is not None and found.is_empty:
            del self.microbatches[at]
