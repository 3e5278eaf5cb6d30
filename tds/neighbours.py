"""The neighbours of a pipeline stage and the process groups that connect them.

NCCL runs all messages of a group in the order in which a rank posted them, and a send ends only when it is received.
Suppose that a stage used one group for all messages. Then a receive could be queued behind a send that cannot end yet.
With three stages, this deadlocks.

Therefore the two directions of a stage boundary use different groups. The two boundaries of a stage also use different
groups: boundaries are numbered 0 and 1 in turn, which is their parity. If an odd number of stages forms a ring, one
boundary has the number 2. All chunks of a pipeline share one group per parity and direction, so a pipeline of any
length needs 2 to 6 groups. deadlocks.py proves that no rank deadlocks. On gloo, messages do not wait for each other, so
all boundaries share two groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .channel import Link, Receiver, Sender
from .groups import new_groups, of_hosts
from .memory import Pool
from .posting import Points
from .queues import boundary_parity, in_queues, posted_ahead
from .schedule import Instruction, RecvActivation, RecvGrad

PREVIOUS, NEXT = "previous", "next"


@dataclass(frozen=True)
class Neighbours:
    """The channels of this stage to the previous and the next stage, which all chunks share.

    senders, receivers: keyed by side, `previous` or `next`; a side is absent if the stage never has a neighbour on it.
    """

    stage: int
    stages: int
    chunks: int
    senders: dict[str, Sender]
    receivers: dict[str, Receiver]

    @property
    def from_previous(self) -> Receiver:
        """The channel of incoming activations."""
        return self.receivers[PREVIOUS]

    @property
    def to_previous(self) -> Sender:
        """The channel of outgoing gradients."""
        return self.senders[PREVIOUS]

    @property
    def to_next(self) -> Sender:
        """The channel of outgoing activations."""
        return self.senders[NEXT]

    @property
    def from_next(self) -> Receiver:
        """The channel of incoming gradients."""
        return self.receivers[NEXT]

    def begin_step(self, instructions: Sequence[Instruction], points: Points) -> None:
        """Prepare the channels for a step whose messages come in the order of these instructions.

        points: for each receiver, message -> how many passes this stage runs before it posts the receive.
        """
        for sender in self.senders.values():
            sender.begin_step()
        for side, receiver in self.receivers.items():
            kind = RecvActivation if side == PREVIOUS else RecvGrad
            receiver.begin_step([each.at for each in instructions if type(each) is kind], points.get(kind, {}))

    def after_pass(self) -> None:
        """Allocate the buffers of the receives that are due after a pass, before any message that follows the pass."""
        for receiver in self.receivers.values():
            receiver.after_pass()

    def post(self) -> None:
        """Post the receives that are due."""
        for receiver in self.receivers.values():
            receiver.post()

    def end_step(self) -> None:
        """Wait until all sends have finished, and free buffers of sizes that the step did not need."""
        for sender in self.senders.values():
            sender.flush()
        for sender in list(self.senders.values())[:1]:
            sender.link.pool.trim()  # all channels share one pool

    def has_previous(self, chunk: int) -> bool:
        """Return whether the inputs of this chunk come from another stage."""
        return self.stage > 0 or chunk > 0

    def has_next(self, chunk: int) -> bool:
        """Return whether the outputs of this chunk go to another stage."""
        return self.stage < self.stages - 1 or chunk < self.chunks - 1


def connect_neighbours(grid: Any, device: torch.device, chunks: int) -> Neighbours:
    """Create the process groups and channels to the neighbouring stages. Collective over all ranks."""
    stages = grid.pipe_parallel_size
    stage = grid.get_stage_id()
    found = Neighbours(stage, stages, chunks, {}, {})
    if stages == 1:
        return found
    # Several chunks add a boundary from the last stage to the first.
    boundaries = stages if chunks > 1 else stages - 1
    parities = 1 + max(boundary_parity(b, stages) for b in range(boundaries))
    pipelines = grid._topo.get_axis_comm_lists("pipe")
    down = []  # for each parity, the group of the messages down the pipeline
    up = []
    for _ in range(parities if in_queues(device) else 1):
        down.append(new_groups(pipelines, urgent=True))
        up.append(new_groups(pipelines, urgent=True))
    hosts = of_hosts(grid.get_pipe_parallel_group()) if in_queues(device) else None
    pool = Pool(device)
    slices = (grid.get_slice_parallel_group(), grid.get_slice_parallel_rank(), grid.get_slice_parallel_world_size())

    def connect(side: str, peer: int, out: Any, back: Any) -> None:
        found.senders[side] = Sender(Link(peer, out, hosts or out, pool, *slices))
        found.receivers[side] = Receiver(Link(peer, back, hosts or back, pool, *slices), posted_ahead(device))

    previous = (stage - 1) % stages
    if stage < boundaries:
        parity = boundary_parity(stage, stages) % len(down)
        connect(NEXT, grid.stage_to_global(stage_id=(stage + 1) % stages), down[parity], up[parity])
    if previous < boundaries:
        parity = boundary_parity(previous, stages) % len(down)
        connect(PREVIOUS, grid.stage_to_global(stage_id=previous), up[parity], down[parity])
    _meet(found, device, parities)
    return found


def _meet(found: Neighbours, device: torch.device, parities: int) -> None:
    """Send one byte each way over every stage boundary, one parity after the other.

    Some libraries connect two ranks at their first message, and the first rank blocks until its peer arrives. This
    function connects the ranks before the first step. The order of parities prevents a deadlock, because a stage has at
    most one boundary of each parity.
    """
    stage = found.stage
    stages = found.stages
    ways = (
        (found.senders.get(NEXT), stage, dist.send),
        (found.receivers.get(PREVIOUS), stage - 1, dist.recv),
        (found.receivers.get(NEXT), stage, dist.recv),
        (found.senders.get(PREVIOUS), stage - 1, dist.send),
    )
    for parity in range(parities):
        for end, boundary, transfer in ways:
            if end and boundary_parity(boundary % stages, stages) == parity:
                byte = torch.zeros(1, dtype=torch.uint8, device=device)
                transfer(byte, end.link.peer, group=end.link.group)
