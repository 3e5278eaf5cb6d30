"""Links of the lab delay, limit, drop and reset packets; hosts have names and disks of their own."""

import itertools
import os
from pathlib import Path

import pytest

from .lab import Host, Lab, lab, needs_hosts

PORTS = itertools.count(5000)
SERVER = """
import socket, sys
server = socket.create_server(("", int(sys.argv[1])))
print("listening", flush=True)
connection, _ = server.accept()
connection.sendall(b"1")
while part := connection.recv(1 << 20):
    pass
connection.sendall(b"2")
"""
# Prints the seconds until the connection stands and until BYTES bytes have been acknowledged.
CLIENT = """
import socket, sys, time
begin = time.monotonic()
connection = socket.create_connection((sys.argv[1], int(sys.argv[3])), timeout=float(sys.argv[4]))
connection.recv(1)
print(time.monotonic() - begin)
connection.sendall(bytes(int(sys.argv[2])))
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
print(time.monotonic() - begin)
"""


def exchange(client: Host, server: Host, size: int, patience: str = "10") -> list[float]:
    """Send `size` bytes from one host to another; return the seconds of the connection and of the transfer."""
    port = str(next(PORTS))
    listens = server.start("python", "-S", "-c", SERVER, port)
    assert listens.stdout is not None and listens.stdout.readline() == "listening\n"
    sends = client.start("python", "-S", "-c", CLIENT, server.name, str(size), port, patience)
    said = sends.communicate(timeout=20)[0]
    assert sends.returncode == 0, said
    return [float(line) for line in said.split()]


def fails(net: Lab) -> str:
    one, two = net.hosts
    with pytest.raises(AssertionError) as error:
        exchange(one, two, 1000, patience="2")
    return str(error.value)


@needs_hosts
def test_links() -> None:
    with lab(2) as net:
        one, two = net.hosts
        assert min(exchange(one, two, 1000)[1] for _ in range(3)) < 0.5
        net.link(one, two, delay=0.05)
        connected, _ = exchange(one, two, 1000)
        assert connected >= 0.2, "two round trips of 0.1 s"
        net.link(one, two, delay=0.0, rate=1e6)
        _, took = exchange(one, two, 1_000_000)
        assert 0.7 < took < 5, "1 MB at 1 MB/s"
        net.link(one, two, rate=0.0, loss=0.05)
        exchange(one, two, 100_000)
        net.link(one, two, loss=0.0, resetting=True)
        assert "ConnectionResetError" in fails(net)
        net.link(one, two, resetting=False)
        net.link(two, up=False)
        assert "TimeoutError" in fails(net)


@needs_hosts
def test_a_host_has_its_own_name_processes_and_disk(tmp_path: Path) -> None:
    with lab(2, shares=tmp_path) as net:
        one, two = net.hosts
        said = one.start("sh", "-c", f"hostname; touch {tmp_path}/mine; ls /proc | grep -c '^[0-9]'").communicate()[0]
        name, processes = said.split()
        assert name == "node1" and int(processes) < 10
        assert two.start("ls", str(tmp_path)).communicate()[0] == ""
        waits = two.start("sleep", "60")
        net.cut_power(two)
        assert waits.wait(5) != 0
        new = net.replace(two)
        assert net.hosts == [one, new]
        exchange(one, new, 1000)
    assert os.uname().nodename != "node1"
