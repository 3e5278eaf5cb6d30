"""Methods of a grid of ranks: DeepSpeed's names, so that DeepSpeed can use the grid; context and expert groups."""

from collections.abc import Iterable
from itertools import product
from typing import Any


class ProcessTopology:
    """Mixin of `Topology`."""

    def get_dim(self: Any, axis: str) -> int:
        """Return the size of `axis`; 0 for an unknown axis, as DeepSpeed expects."""
        return int(getattr(self, axis)) if axis in self.get_axis_names() else 0

    def get_rank_repr(
        self: Any, rank: int, omit_axes: Iterable[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """Return a name of `rank` for file names, e.g. `model_01`."""
        coord = self.get_coord(rank)
        omitted = frozenset(omit_axes)
        shown_axes = [axis for axis in self.get_axis_names() if axis not in omitted]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(coord, axis):02d}" for axis in shown_axes)

    def filter_match(self: Any, **wanted: int) -> list[int]:
        """Return the ranks with all given coordinates, in ascending order; `filter_match(pipe=0)` is the first stage.

        Raises ValueError for an unknown axis.
        """
        axes = self.get_axis_names()
        unknown = wanted.keys() - set(axes)
        if unknown:
            raise ValueError(f"the grid has no axis {sorted(unknown)[0]}; its axes are {', '.join(axes)}")
        choices = []  # for each axis, the coordinates to combine: all, or only the wanted one
        for axis in axes:
            indices = list(range(self.get_dim(axis)))
            if axis in wanted:
                indices = [index for index in indices if index == wanted[axis]]  # empty if it is outside the grid
            choices.append(indices)
        # A loop over all ranks would be slow, as DeepSpeed calls this once for each replica.
        return [self.get_rank(pipe=pipe, data=data, model=model) for pipe, data, model in product(*choices)]

    def get_axis_list(self: Any, axis: str, idx: int) -> list[int]:
        """Return the ranks whose coordinate on `axis` is `idx`."""
        return self.filter_match(**{axis: idx})  # type: ignore[no-any-return]

    def get_axis_comm_lists(self: Any, axis: str) -> list[list[int]]:
        """Return the groups of ranks that communicate along `axis`, each a list; an empty list for an unknown axis."""
        return self.lines(axis) if axis in self.get_axis_names() else []  # type: ignore[no-any-return]

    def consecutive_groups(self: Any, group_size: int) -> list[list[int]]:
        """Return the data-parallel groups, cut into blocks of `group_size` ranks."""
        # For example, the data-parallel group [0, 2, 4, 6] in blocks of 2 gives [0, 2] and [4, 6].
        groups = []
        for ranks in self.lines("data"):
            for begin in range(0, self.data, group_size):
                groups.append(ranks[begin : begin + group_size])
        return groups

    def expert_replicas(self: Any) -> list[list[int]]:
        """Return the groups of ranks that hold the same experts: those with one index in their expert groups."""
        # For example, the expert groups [0, 2] and [4, 6] of a data-parallel group [0, 2, 4, 6] give [0, 4] and [2, 6].
        groups = []
        for ranks in self.lines("data"):
            for expert_rank in range(self.expert):
                groups.append(ranks[expert_rank :: self.expert])
        return groups
