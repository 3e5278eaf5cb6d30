"""Which ranks a stage talks to, and the process groups that they talk over.

NCCL runs all messages of a group one after the other, in the order in which a rank asked for them, and a
send ends only when it was received. So a stage that receives and sends over the same group may wait for a
message that stands after one of its own, and with three stages does. Here neither the two directions of a
border share a group, nor any two borders of one stage: borders take turns with two colours, and with a third
where an odd number of stages stands in a ring. All chunks of a pipeline share one group of a colour each
way, so a pipeline of any length needs 2 to 6. queues.py proves that nobody waits for ever. On gloo, where
messages do not wait for each other, all borders share the two groups.
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
    """The channels of this rank, which lead to the same two neighbours for every chunk, by role.

    from_previous: activations; to_previous: their gradients. to_next: activations; from_next: their gradients. A stage
    has no roles of a side where there is never a neighbour.
    """

    stage: int
    stages: int
    chunks: int
    roles: dict[str, Channel]

    @property
    def from_previous(self) -> Channel:
        """The channel of activations that come in."""
        return self.roles["from_previous"]

    @property
    def to_previous(self) -> Channel:
        """The channel of gradients that go out."""
        return self.roles["to_previous"]

    @property
    def to_next(self) -> Channel:
        """The channel of activations that go out."""
        return self.roles["to_next"]

    @property
    def from_next(self) -> Channel:
        """The channel of gradients that come in."""
        return self.roles["from_next"]

    @property
    def channels(self) -> list[Channel]:
        """All of this stage."""
        return list(self.roles.values())

    def begin_step(self, instructions: Sequence[Instruction], micros: int) -> None:
        """Let the channels know what comes, in the order of these instructions."""

        def agenda(kind: type[Instruction]) -> list[At]:
            return [each.at for each in instructions if type(each) is kind]

        receives = {"from_previous": RecvActivation, "from_next": RecvGrad}
        for role, channel in self.roles.items():
            channel.begin_step(micros, agenda(receives[role]) if role in receives else ())

    def has_previous(self, chunk: int) -> bool:
        """Whether the inputs of this chunk come from another stage."""
        return self.stage > 0 or chunk > 0

    def has_next(self, chunk: int) -> bool:
        """Whether the outputs of this chunk go to another stage."""
        return self.stage < self.stages - 1 or chunk < self.chunks - 1


def open_borders(grid: Any, device: torch.device, chunks: int) -> Borders:
    """Make the groups and channels. Collective: every rank must call it."""
    stages, stage = grid.pipe_parallel_size, grid.get_stage_id()
    roles: dict[str, Channel] = {}
    borders = Borders(stage, stages, chunks, roles)
    if stages == 1:
        return borders
    count = stages if chunks > 1 else stages - 1  # between the chunks, a border leads from the last stage to the first
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
    """Two groups over the ranks of this rank's pipeline, one for each direction."""
    pipes = grid._topo.get_axis_comm_lists("pipe")
    return [of_lines(pipes) for _ in range(2)]


def _meet(borders: Borders, device: torch.device, colours: int) -> None:
    """Send a byte each way over every border, one colour after the other; a stage has at most one border of each.

    Where a library connects two ranks at their first message, it blocks them both until the other comes:
    so they come here, in an order without circles, and not in the middle of a step.
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
