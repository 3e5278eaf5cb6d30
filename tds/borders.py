"""Which ranks a stage talks to, and the process groups that they talk over."""

from typing import Any

import torch
import torch.distributed as dist

from .channel import Channel
from .memory import Pool

Borders = dict[str, dict[int, Channel]]


def open_borders(grid: Any, device: torch.device, chunks: int) -> Borders:
    """The channels of this rank by role and chunk. Collective: every rank must call it.

    Roles: `above` brings activations in, `up` takes their gradients back; `down` takes
    activations out, `below` brings their gradients in.
    """
    stages, stage = grid.pipe_parallel_size, grid.get_stage_id()
    pool = Pool(device)
    slice_ = (grid.get_slice_parallel_group(), grid.get_slice_parallel_rank(), grid.get_slice_parallel_world_size())
    pipes = grid._topo.get_axis_comm_lists("pipe")
    borders: Borders = {role: {} for role in ("above", "up", "down", "below")}

    def pair() -> list[Any]:
        made = [[dist.new_group(ranks) for ranks in pipes] for _ in range(2)]
        mine = next(i for i, ranks in enumerate(pipes) if dist.get_rank() in ranks)
        return [groups[mine] for groups in made]

    def add(roles: tuple[str, str], chunk: int, other: int, groups: Any) -> None:
        for role, group in zip(roles, groups, strict=True):
            borders[role][chunk] = Channel(grid.stage_to_global(stage_id=other), group, device, pool, *slice_)

    # Between the chunks runs a border from the last stage to the first. With two stages it joins the same
    # pair of ranks the other way round, so it has groups of its own.
    for chunk in range(chunks if stages > 1 else 0):
        inside, around = pair(), pair() if chunk < chunks - 1 else None
        if stage < stages - 1:
            add(("down", "below"), chunk, stage + 1, inside)
        elif around:
            add(("down", "below"), chunk, 0, around)
        if stage > 0:
            add(("above", "up"), chunk, stage - 1, inside)
        elif around:
            add(("above", "up"), chunk + 1, stages - 1, around)
    return borders
