"""The neighbours of a pipeline stage and the process groups that connect them.

NCCL runs all messages of a group in the order in which a rank posted them, and a send ends only when it is
received. So a stage that receives and sends over one group may wait for a message queued after one of its own.
This does happen with three stages. Therefore the two directions of a stage boundary use different groups, and so
do the two boundaries of a stage: boundaries alternate between two colours, with a third for an odd number of
stages in a ring. All chunks of a pipeline share one group per colour and direction, so a pipeline of any length
needs 2 to 6 groups. queues.py proves that no rank deadlocks. On gloo, where messages do not wait for each other,
all boundaries share two groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .channel import Channel
from .groups import of_lines
from .memory import Pool
from .queues import colour, in_queues, posted_ahead
from .schedule import At, Instruction, RecvActivation, RecvGrad


@dataclass(frozen=True)
class Borders:
    """The channels of this rank by role; every chunk uses the same two neighbours.

    from_previous: activations; to_previous: their gradients. to_next: activations; from_next: their gradients.
    The roles of a side are absent if the stage never has a neighbour there.
    """

    stage: int
    stages: int
    chunks: int
    roles: dict[str, Channel]

    @property
    def from_previous(self) -> Channel:
        """The channel of incoming activations."""
        return self.roles["from_previous"]

    @property
    def to_previous(self) -> Channel:
        """The channel of outgoing gradients."""
        return self.roles["to_previous"]

    @property
    def to_next(self) -> Channel:
        """The channel of outgoing activations."""
        return self.roles["to_next"]

    @property
    def from_next(self) -> Channel:
        """The channel of incoming gradients."""
        return self.roles["from_next"]

    @property
    def channels(self) -> list[Channel]:
        """All channels of this stage."""
        return list(self.roles.values())

    def begin_step(self, instructions: Sequence[Instruction], micros: int) -> None:
        """Announce the receives of a step to the channels, in the order of these instructions."""

        def agenda(kind: type[Instruction]) -> list[At]:
            return [each.at for each in instructions if type(each) is kind]

        receives = {"from_previous": RecvActivation, "from_next": RecvGrad}
        for role, channel in self.roles.items():
            channel.begin_step(micros, agenda(receives[role]) if role in receives else ())

    def end_step(self) -> None:
        """Wait until all sends have finished, and free buffers of sizes that the step did not need."""
        for channel in self.channels:
            channel.flush()
        for channel in self.channels[:1]:
            channel.pool.trim()  # all channels share it

    def has_previous(self, chunk: int) -> bool:
        """Return whether the inputs of this chunk come from another stage."""
        return self.stage > 0 or chunk > 0

    def has_next(self, chunk: int) -> bool:
        """Return whether the outputs of this chunk go to another stage."""
        return self.stage < self.stages - 1 or chunk < self.chunks - 1


def open_borders(grid: Any, device: torch.device, chunks: int) -> Borders:
    """Create the groups and channels. Collective over all ranks."""
    stages, stage = grid.pipe_parallel_size, grid.get_stage_id()
    roles: dict[str, Channel] = {}
    borders = Borders(stage, stages, chunks, roles)
    if stages == 1:
        return borders
    # Several chunks add a boundary from the last stage to the first.
    count = stages if chunks > 1 else stages - 1
    colours = 1 + max(colour(b, stages) for b in range(count))
    groups = [_groups_of_pipelines(grid) for _ in range(colours if in_queues(device) else 1)]
    pool, ahead = Pool(device), posted_ahead(device)
    slice_ = (grid.get_slice_parallel_group(), grid.get_slice_parallel_rank(), grid.get_slice_parallel_world_size())
    previous, next_ = (stage - 1) % stages, (stage + 1) % stages
    sides = ((("to_next", "from_next"), stage, next_), (("from_previous", "to_previous"), previous, previous))
    for names, number, other in sides:
        if number < count:
            peer = grid.stage_to_global(stage_id=other)
            for role, group in zip(names, groups[colour(number, stages) % len(groups)], strict=True):
                roles[role] = Channel(peer, group, device, pool, ahead, *slice_)
    _meet(borders, device, colours)
    return borders


def _groups_of_pipelines(grid: Any) -> list[Any]:
    """Create two groups over the ranks of this rank's pipeline, one for each direction."""
    pipes = grid._topo.get_axis_comm_lists("pipe")
    return [of_lines(pipes) for _ in range(2)]


def _meet(borders: Borders, device: torch.device, colours: int) -> None:
    """Send one byte each way over every stage boundary, one colour after the other.

    A stage has at most one boundary of each colour. Some libraries connect two ranks at their first message and
    block both until the other arrives. Connecting here, in an order without cycles, keeps that out of the step.
    """
    stage, stages = borders.stage, borders.stages
    for each in range(colours):
        for role, number in (
            ("to_next", stage),
            ("from_previous", stage - 1),
            ("from_next", stage),
            ("to_previous", stage - 1),
        ):
            if role in borders.roles and colour(number % stages, stages) == each:
                channel, byte = borders.roles[role], torch.zeros(1, dtype=torch.uint8, device=device)
                (dist.send if role.startswith("to_") else dist.recv)(byte, channel.peer, group=channel.group)
