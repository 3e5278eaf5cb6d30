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
from typing import Any, NamedTuple

import torch

from .channel import Link, Receiver, Sender
from .groups import host_group, new_groups, open_connections
from .memory import BufferPool
from .posting import PostAfter, read_agenda
from .queues import NEXT, PREVIOUS, boundary_parity, has_message_queues, receives_ahead
from .schedule import Instruction, RecvActivation, RecvGrad


class Neighbours(NamedTuple):
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

    def begin_step(self, instructions: Sequence[Instruction], post_after: PostAfter) -> None:
        """Prepare the channels for a step whose messages come in the order of these instructions.

        post_after: for each receiver, message -> how many passes this stage runs before it posts the receive.
        """
        for sender in self.senders.values():
            sender.begin_step()
        agenda = read_agenda(instructions)
        for side, receiver in self.receivers.items():
            kind = RecvActivation if side == PREVIOUS else RecvGrad
            # with {}, the receiver posts a fixed number in advance
            receiver.begin_step(agenda[kind], post_after.get(kind, {}))

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
        for pool in {sender.link.pool for sender in self.senders.values()}:  # all channels share one pool
            pool.trim()

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
    neighbours = Neighbours(stage, stages, chunks, {}, {})
    if stages == 1:
        return neighbours
    # Boundary i leads from stage i to the next; several chunks add one from the last stage to stage 0.
    num_boundaries = stages if chunks > 1 else stages - 1
    num_parities = 1 + max(boundary_parity(i, stages) for i in range(num_boundaries))

    has_queues = has_message_queues(device)
    pipelines = grid._topo.get_axis_comm_lists("pipe")
    down_groups = []  # for each parity, the group of the messages to next stages
    up_groups = []  # the same for messages to previous stages, because a group has one direction
    for _ in range(num_parities if has_queues else 1):  # on gloo, boundaries can share a group
        down_groups.append(new_groups(pipelines, urgent=True))
        up_groups.append(new_groups(pipelines, urgent=True))
    header_group = host_group(grid.get_pipe_parallel_group()) if has_queues else None
    pool = BufferPool(device)
    slice_info = grid.get_slice_parallel_group(), grid.get_slice_parallel_rank(), grid.get_slice_parallel_world_size()

    def connect(side: str, peer_stage: int, boundary: int, send_groups: list[Any], receive_groups: list[Any]) -> None:
        peer = grid.stage_to_global(stage_id=peer_stage)
        parity = boundary_parity(boundary, stages) % len(down_groups)  # 0 if all boundaries share a group

        def link_of(group: Any) -> Link:
            return Link(peer, group, header_group or group, pool, *slice_info)  # on gloo, headers travel with messages

        neighbours.senders[side] = Sender(link_of(send_groups[parity]))
        neighbours.receivers[side] = Receiver(link_of(receive_groups[parity]), receives_ahead(device))

    if stage < num_boundaries:  # boundary `stage` leads from here to the next stage
        connect(NEXT, (stage + 1) % stages, stage, down_groups, up_groups)
    previous = (stage - 1) % stages
    if previous < num_boundaries:  # boundary `previous` leads here
        connect(PREVIOUS, previous, previous, up_groups, down_groups)
    open_connections(neighbours, device, num_parities)
    return neighbours
