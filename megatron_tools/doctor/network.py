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
PORT = 29500  # default MASTER_PORT of torchrun and DeepSpeed
ASK = (
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
    for number, raw in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        line = raw.split("#")[0].strip()
        if not line:
            continue
        match = re.fullmatch(r"(\S+)\s+slots=(\d+)", line)
        if not match or not int(match[2]):
            raise ValueError(f"{path}, line {number}: {raw.strip()!r} is not of the form 'node1 slots=8'")
        name = match[1]
        if name in hosts:
            raise ValueError(f"{path}, line {number}: host {name} is listed twice; combine both lines")
        hosts[name] = Host(name, int(match[2]))
    if not hosts:
        raise ValueError(f"{path} lists no host")
    return list(hosts.values())


def hostfile(path: str) -> Findings:
    """Check the syntax of a hostfile."""
    try:
        hosts = read_hostfile(path)
    except (OSError, ValueError) as error:
        text = f"cannot read {path}: {error.strerror}" if isinstance(error, OSError) else str(error)
        yield failed("hostfile", text, "write one line for each host, 'name slots=N' (see scripts/hostfile.example)")
        return
    slots = [host.slots for host in hosts]
    yield ok("hostfile", f"{len(hosts)} hosts, {sum(slots)} ranks")
    if len(set(slots)) > 1:
        yield warning(
            "hostfile",
            "hosts have different numbers of slots",
            "check that this is intended: ranks are numbered host by host, so parallel groups may span hosts",
        )


def hosts_answer(
    hosts: Sequence[Host], versions: Sequence[str], marker: Path | None, seconds: float = SSH_SECONDS
) -> Findings:
    """Check over ssh that each host answers, has the expected versions and sees the file `marker`.

    ssh must work without a password. versions: the versions of Python, torch and DeepSpeed on this machine, in this
    order. marker: a file in the run directory; a host that does not see it does not share the disk.
    """
    name = socket.gethostname()
    here = {"localhost", "127.0.0.1", name, name.split(".")[0]}
    others = [host.name for host in hosts if host.name not in here]
    with ThreadPoolExecutor(32) as pool:
        for found in pool.map(lambda name: _ask(name, versions, marker, seconds), others):
            yield from found


def _ask(name: str, versions: Sequence[str], marker: Path | None, seconds: float) -> list[Finding]:
    look = f"; test -e {shlex.quote(str(marker))} && echo SHARED" if marker else ""
    script = (
        f"cd {shlex.quote(os.getcwd())} 2>/dev/null; {shlex.quote(sys.executable)} -c {shlex.quote(ASK)}{look}; true"
    )
    command = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(int(seconds), 1)}", "--", name, script]
    remedy = f"try: ssh -o BatchMode=yes {name} true; it must need no password (ssh-copy-id {name})"
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=2 * seconds, check=False, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        return [
            failed(
                f"host {name}",
                "this machine has no ssh",
                "install an ssh client, or start each node by hand (--node-rank)",
            )
        ]
    except subprocess.TimeoutExpired:
        return [failed(f"host {name}", f"the host did not answer within {2 * seconds:g} s", remedy)]
    if answer.returncode:
        return [failed(f"host {name}", f"ssh: {(answer.stderr.strip().splitlines() or ['no answer'])[-1]}", remedy)]
    there = next((line.split()[1:] for line in answer.stdout.splitlines() if line.startswith("VERSIONS")), None)
    found = []
    if there is None:
        found.append(
            failed(
                f"host {name}",
                f"the host answers, but lacks {sys.executable} or its packages",
                "install the same environment at the same path",
            )
        )
    elif there != list(versions):
        found.append(
            failed(
                f"host {name}",
                f"Python, torch and DeepSpeed are {' '.join(there)} there, but {' '.join(versions)} on this machine",
                "install the same versions on all hosts",
            )
        )
    else:
        found.append(ok(f"host {name}", f"the host answers and has this machine's versions ({' '.join(there)})"))
    if marker and "SHARED" not in answer.stdout.split():
        found.append(
            failed(
                f"disk of {name}",
                f"the host does not see {marker.parent}",
                "put --run-dir (or --save) on a disk that all hosts share",
            )
        )
    elif marker:
        found.append(ok(f"disk of {name}", f"the host sees {marker.parent}"))
    return found


def launcher_variables() -> Findings:
    """Check the environment variables that launchers set. An old `export` may have left a wrong value."""
    remedy = "unset it; launchers set this variable for each rank"
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        text = os.environ.get(name)
        if text is None:
            continue
        if text.isdecimal():
            numbers[name] = int(text)
        least = 1 if "WORLD" in name else 0
        if numbers.get(name, -1) < least:
            yield failed(name, f"the environment variable is {text!r}, which is not a valid number", remedy)
    for rank, ranks in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if rank in numbers and ranks in numbers and numbers[rank] >= numbers[ranks]:
            yield failed(
                rank,
                f"the environment variable is {numbers[rank]}, but must be below {ranks}={numbers[ranks]}",
                remedy,
            )


def rank_0_is_here() -> Findings:
    """Check on rank 0 that MASTER_ADDR is an address of this machine, because rank 0 listens there."""
    address = os.environ.get("MASTER_ADDR")
    if os.environ.get("RANK") != "0" or not address:
        return
    try:
        with socket.socket() as probe:
            probe.bind((address, 0))
    except socket.gaierror:
        return  # the check `names` reports an address that does not resolve
    except OSError as error:
        yield failed(
            "MASTER_ADDR",
            f"{address} is not an address of this machine ({error.strerror}), on which rank 0 runs (RANK=0)",
            "set MASTER_ADDR to the address of the machine on which rank 0 runs, or unset MASTER_ADDR and RANK",
        )


def port_is_free() -> Findings:
    """Check that MASTER_PORT is valid and free on this machine."""
    text = os.environ.get("MASTER_PORT", str(PORT))
    if not text.isdecimal() or not 0 < int(text) < 65536:
        yield failed("port", f"MASTER_PORT={text} is not a port", "set a number between 1024 and 65535")
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # allow a port in TIME_WAIT
        try:
            probe.bind(("", int(text)))
        except OSError as error:
            words = f"port {text} cannot be used: {error.strerror}"
            if "MASTER_PORT" in os.environ:
                yield failed(
                    "port", words, "set another MASTER_PORT, or end the run that uses this port (see ss -ltnp)"
                )
            else:
                yield warning(
                    "port", words, "set MASTER_PORT, e.g. to 29501, or use --standalone, which finds a free port"
                )
            return
    yield ok("port", f"{text} is free")


def names() -> Findings:
    """Check that this machine's name and MASTER_ADDR resolve, and to addresses that other hosts can reach."""
    host = socket.gethostname()
    checked = [
        ("hostname", host, f"add 'ADDRESS {host}' to /etc/hosts, with the address that other hosts reach"),
        ("MASTER_ADDR", os.environ.get("MASTER_ADDR"), "set a name or an address that every host can resolve"),
    ]
    for what, name, remedy in checked:
        if not name:
            continue
        try:
            address = str(socket.getaddrinfo(name, None)[0][4][0])
        except OSError:
            yield failed(what, f"{name} does not resolve", remedy)
            continue
        if address.startswith(LOOPBACK) and not name.startswith(("localhost", *LOOPBACK)):
            yield warning(what, f"{name} resolves to {address}, which no other host can reach", _loopback_remedy(name))
        else:
            yield ok(what, f"{name} resolves to {address}")


def _loopback_remedy(name: str) -> str:
    """Return what to do about a host name that resolves to the loopback device, as on Debian and Ubuntu."""
    return (
        f"none is needed for runs on one machine; for several, put the address that other hosts reach before {name} in "
        "/etc/hosts, or set GLOO_SOCKET_IFNAME if the run does not find the right interface itself"
    )


def interface() -> Findings:
    """Check that GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name existing interfaces."""
    there = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        for wanted in filter(None, os.environ.get(variable, "").split(",")):
            known = wanted in there
            if variable.startswith("NCCL"):
                # The variable may also contain a prefix of the name, =name (exactly this one) or ^name (all others).
                prefix = wanted.lstrip("^=")
                known = wanted.startswith("^") or any(name.startswith(prefix) for name in there)
            if known:
                yield ok("interface", f"{variable}={wanted}")
            else:
                yield failed(
                    "interface",
                    f"{variable}={wanted} is not an interface of this machine, which has {', '.join(there)}",
                    f"unset {variable} or set it to one of these interfaces",
                )


def main(path: str) -> int:
    """Print the number of ranks of a hostfile, for the scripts; or say what is wrong with it, and return 2."""
    try:
        print(sum(host.slots for host in read_hostfile(path)))
    except (OSError, ValueError) as error:
        words = f"{path} cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
        print(f"HOSTFILE={words}; write one line for each host, 'name slots=N'", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
