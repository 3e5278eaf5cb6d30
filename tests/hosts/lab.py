"""Hosts on this machine: namespaces with names, disks and links of their own, joined by a switch (see switch.py)."""

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT

NETWORK = "10.77.0."
# Creates a host and waits: its name, its table of hosts, and the loopback device.
BOOT = """
hostname "$0"
mount --bind "$1" /etc/hosts
ip link set lo up
echo ready
exec cat  # until this process closes the pipe, or has ended
"""
UNSHARE = ("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
CONNECT = f"ip address add {NETWORK}{{}}/24 dev eth0 && ip link set eth0 mtu 9000 up"


@functools.cache
def lacking() -> str:
    """Return what this machine lacks for hosts of its own, or "" if it lacks nothing."""
    if os.geteuid() != 0:
        return "hosts need root"
    missing = [word for word in ("unshare", "nsenter", "ip", "hostname", "mount") if shutil.which(word) is None]
    if missing:
        return f"hosts need {', '.join(missing)}"
    if not os.access("/dev/net/tun", os.W_OK):
        return "hosts need /dev/net/tun"
    tried = subprocess.run([*UNSHARE, "ip", "link", "set", "lo", "up"], capture_output=True, text=True, check=False)
    return f"unshare: {tried.stderr.strip()}" if tried.returncode else ""


def needs_hosts(test: Callable[..., Any]) -> Callable[..., Any]:
    """Skip a test, with the reason, on a machine that cannot make hosts."""

    @functools.wraps(test)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        if lacking():
            pytest.skip(lacking())
        test(*args, **kwargs)

    return wrapped


def right_names(names: Sequence[str], own: int) -> str:
    """Return /etc/hosts of the host number `own` in which each name has its real address."""
    lines = [f"{NETWORK}{number} {name}" for number, name in enumerate(names, start=1)]
    return "\n".join(["127.0.0.1 localhost", *lines, ""])


def debian_names(names: Sequence[str], own: int) -> str:
    """Return /etc/hosts as Debian's installer writes it: the own name is an address of the loopback device."""
    return f"127.0.1.1 {names[own]}\n{right_names(names, own)}"


def other_names(names: Sequence[str], own: int) -> str:
    """Return /etc/hosts without the own name."""
    lines = right_names(names, own).splitlines(keepends=True)
    return "".join(line for line in lines if not line.endswith(f" {names[own]}\n"))


class Host:
    """One host. `pid` is the id, on this machine, of the first process in its namespaces."""

    def __init__(self, name: str, hosts_file: Path) -> None:
        self.name = name
        self.hosts_file = hosts_file
        self._holder = subprocess.Popen(
            [*UNSHARE, "bash", "-c", BOOT, name, str(hosts_file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None and self._holder.stdout.readline() == "ready\n"
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text()
        self.pid = int(children.split()[0])

    def words(self, *argv: str) -> list[str]:
        """Return the command that runs `argv` on this host, in the current directory."""
        return ["nsenter", "-t", str(self.pid), "--net", "--uts", "--mount", "--pid", f"--wdns={ROOT}", *argv]

    def start(
        self, *argv: str, env: Mapping[str, str] | None = None, out: Path | None = None
    ) -> "subprocess.Popen[str]":
        """Start a command on this host; `python` is the Python of the tests. out: file for all its output."""
        full = [sys.executable if argv[0] == "python" else argv[0], *argv[1:]]
        whole = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        stream: Any = subprocess.PIPE if out is None else out.open("w")
        return subprocess.Popen(
            self.words(*full), stdout=stream, stderr=subprocess.STDOUT, env=whole, text=True, stdin=subprocess.DEVNULL
        )

    def call(self, *argv: str) -> None:
        """Run a command on this host and wait for it. Raises CalledProcessError if it fails."""
        subprocess.run(self.words(*argv), check=True)

    def end(self) -> None:
        """Kill all processes of this host, like a power cut."""
        self._holder.kill()
        self._holder.wait()


class Lab:
    """Hosts and the switch between them."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.hosts = [*hosts]
        ports = [f"{host.name}={host.pid}" for host in hosts]
        self._switch = subprocess.Popen(
            [sys.executable, "-S", str(ROOT / "tests" / "hosts" / "switch.py"), *ports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._hear("ready")
        for number, host in enumerate(hosts, start=1):
            host.call("sh", "-c", CONNECT.format(number))

    def link(self, *hosts: Host, **condition: Any) -> None:
        """Change the links of hosts: see the fields of `switch.Port`."""
        for host in hosts:
            assert self._switch.stdin is not None
            self._switch.stdin.write(json.dumps({"host": host.name, **condition}) + "\n")
            self._switch.stdin.flush()
            self._hear("done")

    def cut_power(self, host: Host) -> None:
        """Take a host off the network and kill its processes, so that no packet reports their end."""
        self.link(host, up=False)
        host.end()

    def replace(self, host: Host) -> Host:
        """Put a new host of the same name and address in the place of a dead one; return it."""
        number = self.hosts.index(host)
        made = Host(host.name, host.hosts_file)
        self.hosts[number] = made
        self.link(made, pid=made.pid, up=True)
        made.call("sh", "-c", CONNECT.format(number + 1))
        return made

    def end(self) -> None:
        for host in self.hosts:
            host.end()
        self._switch.kill()
        self._switch.wait()

    def _hear(self, word: str) -> None:
        assert self._switch.stdout is not None
        assert self._switch.stdout.readline() == f"{word}\n"


@contextlib.contextmanager
def lab(
    count: int, names_file: Callable[[Sequence[str], int], str] = right_names, shares: Path | None = None
) -> Iterator[Lab]:
    """Context with hosts node1, node2, ... joined by a switch.

    names_file: function (names, own number) -> text of /etc/hosts. shares: a folder that is not shared: each host has
    its own files there; None: the hosts share all disks.
    """
    names = [f"node{number}" for number in range(1, count + 1)]
    hosts: list[Host] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for number, name in enumerate(names):
            file = Path(folder, f"hosts{number}")
            file.write_text(names_file(names, number))
            host = Host(name, file)
            stack.callback(host.end)
            hosts.append(host)
            if shares is not None:
                own = Path(folder, name)
                own.mkdir()
                host.call("mount", "--bind", str(own), str(shares))
        made = Lab(hosts)
        stack.callback(made.end)
        yield made
