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

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
SIOCGIFADDR = 0x8915  # asks the kernel for the IPv4 address of an interface
UNROUTED_ADDRESSES = ("192.0.2.1", "2001:db8::1")  # addresses of no host, to find the interface of the default route


def choose_interface() -> None:
    """Set GLOO_SOCKET_IFNAME to the interface that reaches MASTER_ADDR, if the run spans hosts and it is not set.

    Raises ValueError if it is set to an interface that this machine does not have.
    """
    chosen = os.environ.get(INTERFACE_VARIABLE)
    if chosen:
        present = [name for _, name in socket.if_nameindex()]
        if not set(chosen.split(",")) <= {*present}:
            raise ValueError(
                f"{INTERFACE_VARIABLE}={chosen}: this machine only has the interfaces {', '.join(present)}"
            )
        return
    if not spans_hosts():
        return
    interface = _interface_to(os.environ["MASTER_ADDR"])
    if interface:
        os.environ[INTERFACE_VARIABLE] = interface


def _interface_to(host: str) -> str | None:
    """Return the interface from which this machine reaches `host`, or None if that is unknown.

    If `host` is this machine by a name that resolves to 127.x, return the only interface to other hosts, or else that
    of the default route.
    """
    address = own_address(host)
    if address is None:
        return None
    interfaces = dict(_own_addresses())  # by address
    if not is_loopback(address):
        return interfaces.get(address)
    external_interfaces = {name for own, name in interfaces.items() if not is_loopback(own)}
    if len(external_interfaces) == 1:
        return external_interfaces.pop()
    for unrouted in UNROUTED_ADDRESSES:  # the default route of IPv4, then that of IPv6
        source = own_address(unrouted)
        if source in interfaces:
            return interfaces[source]
    return None


def own_address(host: str) -> str | None:
    """Return the address from which this machine sends to `host`; None if it does not resolve or has no route."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, target in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):  # any port
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as udp_socket:
                # This sends nothing: the kernel only chooses a route, and with it the own address.
                udp_socket.connect(target)
                return str(udp_socket.getsockname()[0])
    return None


def _own_addresses() -> Iterator[tuple[str, str]]:
    """Yield (address, interface) for each address of this machine that the kernel reports."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface has no IPv4 address
                # The kernel's struct ifreq: the name in 16 bytes, of which the last is 0, then space for the answer:
                # address family (2 bytes), port (2 bytes), address (4 bytes).
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(udp_socket.fileno(), SIOCGIFADDR, request)
                yield socket.inet_ntoa(answer[20:24]), name
    with contextlib.suppress(OSError):  # there is no such file without IPv6
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            # For example: 20010db8000000000000000000000001 02 40 00 80 eth0
            hex_address, _, _, scope, _, name = line.split()
            if scope != "20":  # a link-local address is valid only together with its interface
                yield str(ipaddress.IPv6Address(int(hex_address, 16))), name
