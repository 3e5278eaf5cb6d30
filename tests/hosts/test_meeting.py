"""Ranks of several hosts meet, whatever their names resolve to, or all end with a sentence."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.config.command_line import parse
from megatron.ranks.errors import one_line_error
from megatron.ranks.initialize import initialize_megatron
from tds import meeting

from .lab import debian_names, lab, needs_hosts, other_names, right_names
from .ranks import ends_on_hosts, start_ranks


def _meet() -> None:
    try:
        initialize_megatron(parse(["--startup-timeout-minutes", "0.1"]))
    except ValueError as error:
        print(f"refused: {one_line_error(error)}")
        raise SystemExit(1) from None
    x = torch.ones(1)
    dist.all_reduce(x)
    print(f"sum {x.item()} over {os.environ.get('GLOO_SOCKET_IFNAME')}")


@needs_hosts
@pytest.mark.parametrize("names", [right_names, debian_names])
def test_ranks_meet_by_the_interface_that_reaches_the_first_host(
    names: Callable[[Sequence[str], int], str], tmp_path: Path
) -> None:
    with lab(2, names) as net:
        for rank in ends_on_hosts(net, tmp_path, _meet):
            assert rank.code == 0 and "sum 2.0 over eth0" in rank.stderr, rank.stderr


@needs_hosts
def test_ranks_without_a_name_of_their_own_meet(tmp_path: Path) -> None:
    with lab(2, other_names) as net:
        ranks = start_ranks(net, tmp_path, _meet, MASTER_ADDR="10.77.0.1")
        for each in [rank.end(30) for rank in ranks]:
            assert each.code == 0 and "sum 2.0" in each.stderr, each.stderr


@needs_hosts
def test_ranks_that_cannot_meet_end_together_with_a_sentence(tmp_path: Path) -> None:
    """With the loopback device as interface, each rank waits for the other at an address of its own machine."""
    with lab(2) as net:
        ranks = start_ranks(net, tmp_path, _meet, GLOO_SOCKET_IFNAME="lo")
        for each in [rank.end(60) for rank in ranks]:
            assert each.code == 1 and each.seconds < 20, each
            assert "GLOO_SOCKET_IFNAME" in each.stderr and "node" in each.stderr, each.stderr


@needs_hosts
def test_a_link_that_fails_during_the_meeting_ends_all_ranks_within_the_timeout(tmp_path: Path) -> None:
    with lab(2) as net:
        one, two = net.hosts
        net.link(two, up=False)
        ranks = start_ranks(net, tmp_path, _meet)
        for each in [rank.end(60) for rank in ranks]:
            assert each.code == 1 and each.seconds < 30, each
            assert "node1" in each.stderr


# A second network: the kernel believes to know the other host there, but no packet arrives.
SILENT = """
ip link add eth1 type veth peer name end1
ip address add 10.99.0.{}/24 dev eth1
ip link set end1 up
ip link set eth1 up
ip neighbour add 10.99.0.{} dev eth1 lladdr 02:00:00:00:00:01
"""


def _meet_soon() -> None:
    meeting.GRACE_SECONDS = 1.0
    initialize_megatron(parse(["--startup-timeout-minutes", "0.05"]))


@needs_hosts
def test_ranks_behind_a_silent_network_end_at_the_timeout(tmp_path: Path) -> None:
    """Packets on the chosen interface vanish, so that no rank notices a failure."""
    with lab(2) as net:
        for number, host in enumerate(net.hosts, start=1):
            host.call("sh", "-c", SILENT.format(number, 3 - number))
        ranks = start_ranks(net, tmp_path, _meet_soon, GLOO_SOCKET_IFNAME="eth1")
        for each in [rank.end(60) for rank in ranks]:
            assert each.code == 1 and each.seconds < 12, each
            assert "--startup-timeout-minutes" in each.stderr or "did not meet" in each.stderr, each.stderr
