"""The rank of this process, and printing on rank 0 only."""

from collections.abc import Iterable

import torch.distributed as dist
from tqdm import tqdm


def own_rank() -> int:
    """Return the rank of this process; 0 if torch.distributed is not initialized."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """Return the number of ranks; 1 if torch.distributed is not initialized."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_rank_0() -> bool:
    """Return whether this process is rank 0 or torch.distributed is not initialized."""
    return own_rank() == 0


def print_rank_0(message: object) -> None:
    """Print a line on rank 0, above the progress bar if there is one."""
    if is_rank_0():
        tqdm.write(str(message))


def print_notes(notes: Iterable[str]) -> None:
    """Print a line for each note on rank 0."""
    for note in notes:
        print_rank_0(f"note: {note}")
