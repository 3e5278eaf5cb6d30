"""Axes that few runs have: those of context and expert parallelism, and blocks of another axis."""

from dataclasses import replace

from .mesh import Axis, Mesh, axis_of, group_of_members


def with_subgroups(mesh: Mesh) -> Mesh:
    """Return `mesh` with the axes of context and expert parallelism. All ranks must call this together."""
    topology = mesh.topology
    mesh = replace(mesh, context=axis_of(topology.consecutive_groups(topology.context)))
    if topology.expert == 1:
        return mesh
    # The ranks of an expert-parallel group together hold all experts.
    expert = axis_of(topology.consecutive_groups(topology.expert))
    same_experts = axis_of(topology.expert_replicas())
    # ZeRO and the reduction of experts need a group even for a single rank.
    same_experts = replace(same_experts, group=same_experts.group or group_of_members(same_experts.ranks))
    return replace(mesh, expert=expert, expert_replicas=same_experts)


def neighbours(axis: Axis, count: int) -> Axis:
    """Return the block of `count` consecutive ranks of `axis` that contains this rank.

    All ranks of the block must call this function together. count must divide the size of the axis.
    """
    if count == axis.size:
        return axis
    block_begin = axis.rank - axis.rank % count
    ranks = axis.ranks[block_begin : block_begin + count]
    group = group_of_members(ranks) if count > 1 else None
    return Axis(group, ranks, axis.rank - block_begin)
