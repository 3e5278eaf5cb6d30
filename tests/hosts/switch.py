"""A switch: forwards IP packets between the TUN devices of hosts, and delays, drops, limits or resets them on request.

python switch.py NAME=PID ...: for each host, the process id of a process in its network namespace. The switch creates
the device eth0 in each of these namespaces and prints `ready`. Then it reads one JSON object a line from its standard
input, such as {"host": "node2", "up": false}. A new "pid" puts another host in the place of a dead one. The switch ends
when its input ends, and the devices disappear with it.

The kernels of many CI machines lack netem, so this process does its work. It uses only the standard library.
"""

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import socket
import struct
import sys
import time
from dataclasses import dataclass

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
MTU = 9000
LONGEST_QUEUE = 0.2  # seconds of packets that wait for a limited link; further packets are dropped
NETWORK = "10.77.0."


@dataclass
class Port:
    """The link between one host and the switch.

    delay: one-way delay of packets from this host in seconds. loss: share of its packets that are dropped.
    rate: bytes a second that it can send; 0 for no limit. resetting: whether its TCP connections are reset.
    """

    device: int
    up: bool = True
    delay: float = 0.0
    loss: float = 0.0
    rate: float = 0.0
    resetting: bool = False
    free_at: float = 0.0  # when the limited link has sent all packets


def open_device(pid: int) -> int:
    """Create eth0 in the network namespace of process `pid`; return its file descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as here, open(f"/proc/{pid}/ns/net") as there:
        if libc.setns(there.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", b"eth0", IFF_TUN | IFF_NO_PI))
        libc.setns(here.fileno(), CLONE_NEWNET)
    return device


def checksum(data: bytes) -> int:
    """Return the checksum of IP and TCP headers."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def reset_of(packet: bytes) -> tuple[bytes, bytes] | None:
    """Return the packets that reset a TCP connection: one for the sender of `packet`, one for its receiver.

    Return None if `packet` belongs to no open TCP connection.
    """
    begin = 4 * (packet[0] & 0xF)
    if packet[9] != socket.IPPROTO_TCP or packet[begin + 13] & 0x06:  # SYN or RST
        return None
    source = packet[12:16]
    target = packet[16:20]
    ports = packet[begin : begin + 4]
    sequence = packet[begin + 4 : begin + 8]
    acknowledged = packet[begin + 8 : begin + 12]
    to_sender = _reset(target, source, ports[2:] + ports[:2], acknowledged)
    to_receiver = _reset(source, target, ports, sequence)
    return to_sender, to_receiver


def _reset(source: bytes, target: bytes, ports: bytes, sequence: bytes) -> bytes:
    tcp = ports + sequence + bytes(4) + bytes([5 << 4, 0x04]) + bytes(6)
    pseudo = source + target + struct.pack("!HH", socket.IPPROTO_TCP, len(tcp))
    tcp = tcp[:16] + struct.pack("!H", checksum(pseudo + tcp)) + tcp[18:]
    ip = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(tcp), 0, 0, 64, socket.IPPROTO_TCP, 0) + source + target
    return ip[:10] + struct.pack("!H", checksum(ip)) + ip[12:] + tcp


class Switch:
    """All ports, and the packets on their way. ports: keyed by IPv4 address."""

    def __init__(self, ports: dict[bytes, Port], names: dict[str, Port]) -> None:
        self.ports = ports
        self.names = names
        self._waiting: list[tuple[float, int, bytes, bytes]] = []  # time of delivery, number, target, packet
        self._number = 0
        self._poll = select.poll()
        self._sources = {port.device: port for port in names.values()}

    def run(self) -> None:
        """Forward packets until standard input ends."""
        for device in [*self._sources, 0]:
            self._poll.register(device, select.POLLIN)
        while True:
            wait = None
            if self._waiting:
                wait = max(0.0, 1e3 * (self._waiting[0][0] - time.monotonic()))
            for device, _ in self._poll.poll(wait):
                if device == 0:
                    line = sys.stdin.readline()
                    if not line:
                        return
                    self._obey(json.loads(line))
                elif device in self._sources:
                    self._take(self._sources[device])
            self._deliver()

    def _obey(self, order: dict[str, object]) -> None:
        port = self.names[str(order.pop("host"))]
        if "pid" in order:
            self._unplug(port)
            os.close(port.device)
            port.device = open_device(int(str(order.pop("pid"))))
            self._sources[port.device] = port
            self._poll.register(port.device, select.POLLIN)
        for name, value in order.items():
            setattr(port, name, value)
        print("done", flush=True)

    def _unplug(self, port: Port) -> None:
        """Stop reading from a host."""
        if self._sources.pop(port.device, None):
            self._poll.unregister(port.device)

    def _take(self, port: Port) -> None:
        """Read all packets that a host has sent."""
        while True:
            try:
                packet = os.read(port.device, MTU + 100)
            except BlockingIOError:
                return
            except OSError:  # the host is gone, and its device with it
                self._unplug(port)
                return
            if packet[0] >> 4 == 4 and packet[16:20] in self.ports:
                self._forward(port, packet)

    def _forward(self, port: Port, packet: bytes) -> None:
        target = packet[16:20]
        if not (port.up and self.ports[target].up) or random.random() < port.loss:
            return
        now = time.monotonic()
        if port.resetting and (resets := reset_of(packet)):
            self._send(packet[12:16], resets[0])
            self._send(target, resets[1])
            return
        begin = max(now, port.free_at)
        if begin - now > LONGEST_QUEUE:
            return
        port.free_at = begin + len(packet) / port.rate if port.rate else now
        if port.delay or port.rate:
            self._number += 1
            heapq.heappush(self._waiting, (port.free_at + port.delay, self._number, target, packet))
        else:
            self._send(target, packet)

    def _deliver(self) -> None:
        """Send all packets whose time has come."""
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, _, target, packet = heapq.heappop(self._waiting)
            if self.ports[target].up:
                self._send(target, packet)

    def _send(self, target: bytes, packet: bytes) -> None:
        with contextlib.suppress(OSError):  # the host is gone, or its queue is full
            os.write(self.ports[target].device, packet)


def main(words: list[str]) -> None:
    ports = {}
    names = {}
    for number, word in enumerate(words, start=1):
        name, pid = word.split("=")
        names[name] = Port(open_device(int(pid)))
        ports[socket.inet_aton(f"{NETWORK}{number}")] = names[name]
    print("ready", flush=True)
    Switch(ports, names).run()


if __name__ == "__main__":
    main(sys.argv[1:])
