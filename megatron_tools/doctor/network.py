"""Checks of the network: whether the hosts of a run can reach each other."""

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from .finding import Finding, Findings, failed, ok, warning

SSH_SECONDS = 10
LOOPBACK = ("127.", "::1")  # addresses of the machine itself
DEFAULT_PORT = 29500  # default MASTER_PORT of torchrun and DeepSpeed
VERSION_SCRIPT = (
    "import importlib.metadata as m, os, sys; "
    "print('VERSIONS', '.'.join(map(str, sys.version_info[:2])), *(m.version(n) for n in ('torch', 'deepspeed')))"
)


class Host(NamedTuple):
    """One host listed in a hostfile."""

    name: str
    slots: int


def read_hostfile(path: str) -> list[Host]:
    """Read a hostfile of DeepSpeed's launcher, with lines like `node1 slots=8`.

    Raises ValueError, naming the line, for a malformed file, and OSError for an unreadable one.
    """
    hosts: dict[str, Host] = {}
    for line_number, raw_line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        line = raw_line.split("#")[0].strip()
        if not line:
            continue
        match = re.fullmatch(r"(\S+)\s+slots=(\d+)", line)
        if not match or not int(match[2]):
            raise ValueError(f"{path}, line {line_number}: {raw_line.strip()!r} is not of the form 'node1 slots=8'")
        name = match[1]
        if name in hosts:
            raise ValueError(f"{path}, line {line_number}: host {name} is listed twice; combine both lines")
        hosts[name] = Host(name, int(match[2]))
    if not hosts:
        raise ValueError(f"{path} lists no host")
    return list(hosts.values())


def check_hostfile(path: str) -> Findings:
    """Check the syntax of a hostfile."""
    try:
        hosts = read_hostfile(path)
    except (OSError, ValueError) as error:
        message = f"cannot read {path}: {error.strerror}" if isinstance(error, OSError) else str(error)
        yield failed("hostfile", message, "write one line for each host, 'name slots=N' (see scripts/hostfile.example)")
        return
    slots = [host.slots for host in hosts]
    yield ok("hostfile", f"{len(hosts)} hosts, {sum(slots)} ranks")
    if len(set(slots)) > 1:
        yield warning(
            "hostfile",
            "hosts have different numbers of slots",
            "check that this is intended: ranks are numbered host by host, so parallel groups may span hosts",
        )


def check_hosts(hosts: Sequence[Host], versions: Sequence[str], marker: Path | None, seconds: float) -> Findings:
    """Check over ssh that each host answers, has the expected versions and sees the file `marker`.

    ssh must work without a password. versions: the versions of Python, torch and DeepSpeed on this machine, in this
    order. marker: a file in the run directory; a host that does not see it does not share the disk.
    """
    own_name = socket.gethostname()
    own_names = {"localhost", "127.0.0.1", own_name, own_name.split(".")[0]}
    other_hosts = [host.name for host in hosts if host.name not in own_names]

    def check(name: str) -> list[Finding]:
        # list() runs the whole check in the pool's thread. A generator would run only when it is read.
        return list(_check_host(name, versions, marker, seconds))

    # At most 32 hosts are asked at the same time; the findings keep the order of the hosts.
    with ThreadPoolExecutor(32) as pool:
        for findings in pool.map(check, other_hosts):
            yield from findings


def _check_host(name: str, versions: Sequence[str], marker: Path | None, seconds: float) -> Findings:
    """Yield the findings about one host. The parameters are those of `check_hosts`."""
    test = f"; test -e {shlex.quote(str(marker))} && echo SHARED" if marker else ""
    # The script ends with `true`, so any other exit code comes from ssh itself.
    script = (
        f"cd {shlex.quote(os.getcwd())} 2>/dev/null; {shlex.quote(sys.executable)} -c {shlex.quote(VERSION_SCRIPT)}"
        f"{test}; true"
    )
    command = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(int(seconds), 1)}", "--", name, script]
    remedy = f"try: ssh -o BatchMode=yes {name} true; it must need no password (ssh-copy-id {name})"
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=2 * seconds, check=False, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        yield failed(
            f"host {name}", "this machine has no ssh", "install an ssh client, or start each node by hand (--node-rank)"
        )
        return
    except subprocess.TimeoutExpired:
        yield failed(f"host {name}", f"the host did not answer within {2 * seconds:g} s", remedy)
        return
    if process.returncode:
        yield failed(f"host {name}", f"ssh: {(process.stderr.strip().splitlines() or ['no answer'])[-1]}", remedy)
        return
    # The shell of the host may print other lines; without a line VERSIONS, Python or a package is missing.
    remote = next((line.split()[1:] for line in process.stdout.splitlines() if line.startswith("VERSIONS")), None)
    if remote is None:
        yield failed(
            f"host {name}",
            f"the host answers, but lacks {sys.executable} or its packages",
            "install the same environment at the same path",
        )
    elif remote != list(versions):
        yield failed(
            f"host {name}",
            f"Python, torch and DeepSpeed are {' '.join(remote)} there, but {' '.join(versions)} on this machine",
            "install the same versions on all hosts",
        )
    else:
        yield ok(f"host {name}", f"the host answers and has this machine's versions ({' '.join(remote)})")
    if marker and "SHARED" not in process.stdout.split():
        yield failed(
            f"disk of {name}",
            f"the host does not see {marker.parent}",
            "put --run-dir (or --save) on a disk that all hosts share",
        )
    elif marker:
        yield ok(f"disk of {name}", f"the host sees {marker.parent}")


def check_launcher_variables() -> Findings:
    """Check the environment variables that launchers set. An old `export` may have left a wrong value."""
    remedy = "unset it; launchers set this variable for each rank"
    values = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        value = os.environ.get(name)
        if value is None:
            continue
        if value.isdecimal():
            values[name] = int(value)
        # A size is at least 1, a rank at least 0. A text that is no number counts as -1.
        minimum = 1 if "WORLD" in name else 0
        if values.get(name, -1) < minimum:
            yield failed(name, f"the environment variable is {value!r}, which is not a valid number", remedy)
    # Ranks are numbered from 0, so the highest is the size minus 1.
    for rank_name, size_name in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if rank_name in values and size_name in values and values[rank_name] >= values[size_name]:
            yield failed(
                rank_name,
                f"the environment variable is {values[rank_name]}, but must be below {size_name}={values[size_name]}",
                remedy,
            )


def check_master_address() -> Findings:
    """Check on rank 0 that MASTER_ADDR is an address of this machine, because rank 0 listens there."""
    address = os.environ.get("MASTER_ADDR")
    if os.environ.get("RANK") != "0" or not address:
        return
    try:
        # A socket can be bound only to an address of this machine. Port 0 stands for any free port.
        with socket.socket() as probe:
            probe.bind((address, 0))
    except socket.gaierror:
        return  # the check `check_host_names` reports an address that does not resolve
    except OSError as error:
        yield failed(
            "MASTER_ADDR",
            f"{address} is not an address of this machine ({error.strerror}), on which rank 0 runs (RANK=0)",
            "set MASTER_ADDR to the address of the machine on which rank 0 runs, or unset MASTER_ADDR and RANK",
        )


def check_port() -> Findings:
    """Check that MASTER_PORT is valid and free on this machine."""
    port = os.environ.get("MASTER_PORT", str(DEFAULT_PORT))
    if not port.isdecimal() or not 0 < int(port) < 65536:
        yield failed("port", f"MASTER_PORT={port} is not a port", "set a number between 1024 and 65535")
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # allow a port in TIME_WAIT
        try:
            probe.bind(("", int(port)))
        except OSError as error:
            message = f"port {port} cannot be used: {error.strerror}"
            if "MASTER_PORT" in os.environ:
                yield failed(
                    "port", message, "set another MASTER_PORT, or end the run that uses this port (see ss -ltnp)"
                )
            else:
                yield warning(
                    "port", message, "set MASTER_PORT, e.g. to 29501, or use --standalone, which finds a free port"
                )
            return
    yield ok("port", f"{port} is free")


def check_host_names() -> Findings:
    """Check that this machine's name and MASTER_ADDR resolve, and to addresses that other hosts can reach."""
    hostname = socket.gethostname()
    checked = [
        ("hostname", hostname, f"add 'ADDRESS {hostname}' to /etc/hosts, with the address that other hosts reach"),
        ("MASTER_ADDR", os.environ.get("MASTER_ADDR"), "set a name or an address that every host can resolve"),
    ]
    for source, name, remedy in checked:
        if not name:  # MASTER_ADDR is not set
            continue
        try:
            # The address in the first result: [0] is the result, [4] its socket address, and [0] the host of that.
            address = str(socket.getaddrinfo(name, None)[0][4][0])
        except OSError:
            yield failed(source, f"{name} does not resolve", remedy)
            continue
        means_this_machine = name.startswith(("localhost", *LOOPBACK))
        if address.startswith(LOOPBACK) and not means_this_machine:
            # Debian and Ubuntu let the host name resolve to the loopback device.
            yield warning(
                source,
                f"{name} resolves to {address}, which no other host can reach",
                f"none is needed for runs on one machine; for several, put the address that other hosts reach before "
                f"{name} in /etc/hosts, or set GLOO_SOCKET_IFNAME if the run does not find the right interface itself",
            )
        else:
            yield ok(source, f"{name} resolves to {address}")


def check_interfaces() -> Findings:
    """Check that GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name existing interfaces."""
    existing = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = os.environ.get(variable, "")
        is_nccl = variable.startswith("NCCL")
        if is_nccl and value.startswith("^"):  # interfaces that NCCL must not use
            yield ok("interface", f"{variable}={value}")
            continue
        # NCCL takes the names for prefixes, unless the list begins with =. Gloo takes whole names.
        has_prefixes = is_nccl and not value.startswith("=")
        # A variable that is not set has no names: "".split(",") is [""], and filter removes the empty text.
        for wanted in filter(None, value.removeprefix("=").split(",")):
            is_known = wanted in existing
            if has_prefixes:
                is_known = any(name.startswith(wanted) for name in existing)
            if is_known:
                yield ok("interface", f"{variable}={wanted}")
            else:
                yield failed(
                    "interface",
                    f"{variable}={wanted} is not an interface of this machine, which has {', '.join(existing)}",
                    f"unset {variable} or set it to one of these interfaces",
                )


def main(path: str) -> int:
    """Print the number of ranks of a hostfile, for the scripts; or say what is wrong with it, and return 2."""
    try:
        print(sum(host.slots for host in read_hostfile(path)))
    except (OSError, ValueError) as error:
        message = f"{path} cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
        print(f"HOSTFILE={message}; write one line for each host, 'name slots=N'", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
