"""End of a run in which a host falls silent: a machine without power or network sends nothing that ends a wait for it.

Each rank keeps an idle TCP connection to rank 0. The kernels of both hosts probe it (keepalive), whatever the processes
do. So a silent host is noticed within a step of any length. A long step, a stopped process or one that holds Python's
lock does not count as silent.
"""

import contextlib
import errno
import json
import os
import selectors
import socket
import time

import torch.distributed as dist

from ._torch import default_store
from .diagnose import Watchdog
from .fault_board import HOST_KEY, FaultBoard, name_ranks, name_this_rank
from .messages import say
from .parent_death import spans_hosts, start_thread

TIMEOUT_VARIABLE = "TDS_HOST_TIMEOUT"
DEFAULT_SECONDS = 45.0  # default silence after which a host counts as lost; the report takes a few seconds more
PORT_KEY = "tds/heartbeat"
SILENT_ERRORS = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN}


def host_timeout() -> float:
    """Return the silence in seconds after which a host counts as lost; 0 turns this off. Raises ValueError."""
    text = os.environ.get(TIMEOUT_VARIABLE) or str(DEFAULT_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0  # refused below
    if not 0 <= seconds < 1e6:
        raise ValueError(f"{TIMEOUT_VARIABLE}={text} in the environment is not a number of seconds; give 0 or more")
    return seconds


def watch_hosts() -> None:
    """Start to watch the other hosts, if this run spans hosts. Call it on all ranks, after they have met."""
    seconds = host_timeout()
    if dist.get_backend() == "fake":  # a simulated world without other processes
        return
    is_watched = bool(seconds) and spans_hosts()  # this rank's view: hosts may have other environment variables
    store = default_store()
    if is_watched:
        store.set(f"{HOST_KEY}{dist.get_rank()}", socket.gethostname())
    if dist.get_rank() == 0:
        port = 0  # means for the other ranks that rank 0 watches nothing
        if is_watched:
            listener = _listen()
            port = listener.getsockname()[1]
            start_thread("tds-heartbeat", _watch_connections, listener, seconds)
        store.set(PORT_KEY, str(port))
    elif is_watched:
        port = int(store.get(PORT_KEY))
        if port:
            start_thread("tds-heartbeat", _watch_rank_0, port, seconds)


def _listen() -> socket.socket:
    """Return a socket that listens on a free port, for IPv6 and IPv4 if this host has both."""
    with contextlib.suppress(OSError):
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)  # this host has no IPv6


def _enable_keepalive(connection: socket.socket, seconds: float) -> None:
    """Make the kernel probe an idle connection, and end it when the other host has been silent for `seconds`."""
    # For example, 45 s: a first probe after 15 s of silence, then one every 5 s, and the end when 7 have no answer.
    idle = max(1, int(seconds / 3))  # seconds before the first probe
    interval = max(1, int(seconds / 9))  # seconds between two probes
    probes = 1 + int((seconds - idle) / interval)
    tcp = socket.IPPROTO_TCP
    connection.settimeout(None)  # a read waits without limit, until the kernel ends the connection
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(tcp, socket.TCP_KEEPIDLE, idle)
    connection.setsockopt(tcp, socket.TCP_KEEPINTVL, interval)
    connection.setsockopt(tcp, socket.TCP_KEEPCNT, probes)
    # The same limit in ms for sent data that the other host does not acknowledge.
    connection.setsockopt(tcp, socket.TCP_USER_TIMEOUT, int(1000 * seconds))


def _watch_connections(listener: socket.socket, seconds: float) -> None:
    """Accept connections of the other ranks on rank 0, and announce a fault when the host of one has fallen silent."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if connection is listener:
                with contextlib.suppress(OSError):  # the connection may have ended already
                    accepted = listener.accept()[0]
                    _enable_keepalive(accepted, seconds)
                    # This bytearray gets the name of the rank's host, which the rank sends first.
                    selector.register(accepted, selectors.EVENT_READ, data=bytearray())
                continue
            # A rank has sent its host's name, or the connection has ended. After a silence of `seconds`, the kernel
            # ends it with an error, of which the function announces a fault.
            is_open = _read_name_or_announce_silence(connection, key.data, seconds)
            if not is_open:
                selector.unregister(connection)
                connection.close()


def _read_name_or_announce_silence(connection: socket.socket, host_name: bytearray, seconds: float) -> bool:
    """Read from the connection of a rank, and return False if the connection has ended.

    A rank sends only the name of its host, as JSON; append the received part of it to `host_name`. If the connection
    has ended because that host is silent, announce a fault. Another end is no fault here: the rank connects again, or
    its process has ended, which its watchdog or another rank reports.
    """
    try:
        received = connection.recv(4096)
    except OSError as error:
        if error.errno in SILENT_ERRORS:
            with contextlib.suppress(Exception):  # without a name, or without a store, rank 0 has nothing to announce
                host = json.loads(host_name)
                board = FaultBoard("run")
                ranks = [rank for rank, name in board.host_names().items() if name == host]
                board.announce(_describe_silence(f"{host} ({name_ranks(ranks)})", seconds))
        return False
    host_name.extend(received)
    return bool(received)  # nothing is received when the rank has closed the connection


def _describe_silence(host: str, seconds: float) -> str:
    """Return the message that `host` has not answered for `seconds`."""
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
    return (
        f"{host} has not answered since {since}, for {seconds:g} s ({TIMEOUT_VARIABLE}): the machine is off or hangs, "
        "or the network to it is down"
    )


def _watch_rank_0(port: int, seconds: float) -> None:
    """Wait until the host of rank 0 falls silent, then end this process. A thread of each other rank runs this."""
    rank_0_host = os.environ["MASTER_ADDR"]
    try:
        connection = _connect(rank_0_host, port, seconds)
    except OSError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # one note for each host
            say(
                f"note: {name_this_rank(dist.get_rank())} cannot connect to port {port} of {rank_0_host} ({error}), so "
                "the run notices late if one of these machines loses its power; open the ports of that host"
            )
        return
    try:
        while True:
            with contextlib.suppress(ConnectionError), connection:
                connection.recv(1)  # waits for the end of the connection, because rank 0 sends nothing
                return  # the process of rank 0 has ended, and its host may be switched off
            # Something between the hosts has reset the connection, so connect again.
            time.sleep(1.0)
            connection = _connect(rank_0_host, port, seconds)
    except OSError as error:
        # If `_connect` itself gives up, its TimeoutError has no errno.
        is_silent = error.errno in SILENT_ERRORS or isinstance(error, TimeoutError)
        if not is_silent:
            return  # rank 0 has ended, which the watchdog notices
    watchdog = Watchdog.latest
    assert watchdog is not None, "watch_startup() creates a watchdog"
    watchdog.exit_with_stack(
        f"{name_this_rank(dist.get_rank())}: {_describe_silence(f'{rank_0_host} (rank 0)', seconds)}"
    )


def _connect(host: str, port: int, seconds: float) -> socket.socket:
    """Connect to rank 0, and send the name of this host."""
    connection = socket.create_connection((host, port), timeout=seconds)
    _enable_keepalive(connection, seconds)
    connection.sendall(json.dumps(socket.gethostname()).encode())
    return connection
