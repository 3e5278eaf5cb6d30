"""The process groups of a run."""

import time

import pytest
import torch
import torch.distributed as dist

from megatron import mpu
from megatron.arguments import parse
from megatron.initialize import initialize_megatron
from tests.support import on_ranks


def _late() -> float:
    initialize_megatron(parse(["--distributed-timeout-minutes", "0.05", "--pipe-parallel-size", "2"]))
    begin = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="(?i)timed out"):
            dist.all_reduce(torch.ones(1), group=mpu.get_pipe_parallel_group())
    else:
        time.sleep(6)
    return time.monotonic() - begin


def test_a_rank_that_does_not_come_ends_the_wait() -> None:
    """--distributed-timeout-minutes holds for the groups of the grid, not for the world alone."""
    waited, _ = on_ranks(2, _late)
    assert 2 < waited < 6
