"""A host that falls silent ends the run, named with its ranks; slow and stopped processes do not."""

import ctypes
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.config.command_line import parse
from megatron.ranks.initialize import initialize_megatron
from tests.support import covering

from .lab import lab, needs_hosts
from .ranks import start_ranks

SECONDS = "3"
CHOSEN = [("power", 0), ("link", 1)]


def _wait_for_each_other(before: str, steps: int, seconds: float) -> None:
    """All-reduce `steps` times, each after `seconds` of sleep. before: what rank 1 does to its process before."""
    initialize_megatron(parse([]))
    print("met", flush=True)
    if dist.get_rank() == 1 and before == "hold":
        ctypes.PyDLL(None).sleep(5)  # no other thread of Python can run meanwhile
    x = torch.ones(1)
    for _ in range(steps):
        time.sleep(seconds)
        dist.all_reduce(x)
    print(f"sum {x.item()}", flush=True)


def wait_for(log: Path, word: str) -> None:
    deadline = time.monotonic() + 60
    while not log.exists() or word not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


@needs_hosts
@pytest.mark.parametrize(
    ("how", "victim"),
    covering([("power", 0), ("link", 1), ("power", 1), ("link", 0)], lambda case: case in CHOSEN, several=True),
)
def test_a_silent_host_is_named_by_all_others(how: str, victim: int, tmp_path: Path) -> None:
    with lab(3) as net:
        ranks = start_ranks(net, tmp_path, _wait_for_each_other, "", 1000, 0.02, TDS_HOST_TIMEOUT=SECONDS)
        for rank in ranks:
            wait_for(rank.log, "met")
        host = net.hosts[victim]
        net.link(host, up=False)
        if how == "power":
            ranks[victim].kill()
        begin = time.monotonic()
        ends = [rank.end(30) for number, rank in enumerate(ranks) if how == "link" or number != victim]
        assert time.monotonic() - begin < 15
        words = "".join(end.stderr for end in ends)
        assert f"node{victim + 1} (rank {victim}) has not answered since" in words, words
        assert all(end.code == 1 for end in ends), ends


@needs_hosts
@pytest.mark.parametrize("what", covering(["hold", "stop", "short cut"], lambda what: what != "hold"))
def test_what_is_slow_is_not_silent(what: str, tmp_path: Path) -> None:
    """A process that holds Python's lock, one that is stopped, and a link that is down for less than the timeout."""
    with lab(2) as net:
        ranks = start_ranks(net, tmp_path, _wait_for_each_other, what, 3, 0.5, TDS_HOST_TIMEOUT=SECONDS)
        for rank in ranks:
            wait_for(rank.log, "met")
        if what == "stop":
            os.kill(ranks[1].pid, signal.SIGSTOP)
            time.sleep(5)
            os.kill(ranks[1].pid, signal.SIGCONT)
        if what == "short cut":
            net.link(net.hosts[1], up=False)
            time.sleep(1.5)
            net.link(net.hosts[1], up=True)
        for end in [rank.end(30) for rank in ranks]:
            assert end.code == 0 and "sum 8.0" in end.stderr, end.stderr
