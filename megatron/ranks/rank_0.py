"""What only rank 0 says, for all of them."""

import torch.distributed as dist
from tqdm import tqdm


def is_rank_0() -> bool:
    """Whether this is rank 0, or no ranks have met."""
    return not dist.is_initialized() or dist.get_rank() == 0


def print_rank_0(message: str) -> None:
    """One line on rank 0, above the progress bar if there is one."""
    if is_rank_0():
        tqdm.write(message)
