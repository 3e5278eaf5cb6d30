"""Choice of the network interface for gloo: the interface that reaches the other hosts.

Without a choice, gloo listens at the address that this machine's name resolves to. On Debian and Ubuntu that is
127.0.1.1, which other hosts cannot reach.
"""

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from .parent_death import is_loopback, spans_hosts

VARIABLE = "GLOO_SOCKET_IFNAME"
SIOCGIFADDR = 0x8915  # asks the kernel for the IPv4 address of an interface
ANYWHERE = ("192.0.2.1", "2001:db8::1")  # addresses of no host, to find the interface of the default route


def choose_interface() -> None:
    """Set GLOO_SOCKET_IFNAME to the interface that reaches MASTER_ADDR, if the run spans hosts and it is not set."""
    if os.environ.get(VARIABLE) or not spans_hosts():
        return
    interface = _towards(os.environ["MASTER_ADDR"])
    if interface:
        os.environ[VARIABLE] = interface


def _towards(host: str) -> str | None:
    """Return the interface from which this machine reaches `host`, or None if that is unknown.

    If `host` is this machine by a name that resolves to 127.x, return the only interface to other hosts, or else that
    of the default route.
    """
    address = own_address(host)
    if address is None:
        return None
    interfaces = dict(_addresses())
    if is_loopback(address):
        others = {name for each, name in interfaces.items() if not is_loopback(each)}
        if len(others) == 1:
            return others.pop()
        routes = map(own_address, ANYWHERE)
        return next((interfaces[each] for each in routes if each in interfaces), None)
    return interfaces.get(address)


def own_address(host: str) -> str | None:
    """Return the address from which this machine sends to `host`; None if it does not resolve or has no route."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, target in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as asking:
                asking.connect(target)  # a datagram socket sends nothing for this
                return str(asking.getsockname()[0])
    return None


def _addresses() -> Iterator[tuple[str, str]]:
    """Yield (address, interface) for each address of this machine that the kernel reports."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface has no IPv4 address
                answer = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield socket.inet_ntoa(answer[20:24]), name
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope != "20":  # an address of the link needs its interface in each connection
                yield str(ipaddress.IPv6Address(int(digits, 16))), name
