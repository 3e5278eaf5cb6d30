"""Settings that the ranks' store needs in a large run: open files of the process that hosts it, and fewer queries."""

import os
import resource

from .fault_board import ticks_between_queries
from .messages import say

FILES_PER_RANK = 4  # open files for each rank: for torch, each fault board (at most two) and the heartbeat
OWN_FILES = 512  # open files that the process needs besides the store: libraries, corpora, data workers
USUAL_LIMIT = 1024  # the soft limit of open files on most systems
NCCL_QUERIES = "TORCH_NCCL_COORD_CHECK_MILSEC"  # milliseconds between two queries of torch's NCCL monitor, default 1000


def prepare_store_host() -> None:
    """Prepare for the ranks' store, before it is created: fewer queries by torch, more open files where it is hosted.

    torch's NCCL monitor queries the store once a second in every rank, to learn of a timeout of another rank. In runs
    of more than 200 ranks it queries less often, unless the environment sets the interval. On rank 0, raise the soft
    limit of open files of this process and of torchrun's agent, of which one hosts the store. If a limit is too low,
    print a warning that says what to do.
    """
    world = int(os.environ.get("WORLD_SIZE") or 1)
    if world == 1:
        return
    ticks = ticks_between_queries(1, world)  # of each rank but 0
    if ticks > 1:
        os.environ.setdefault(NCCL_QUERIES, str(1000 * ticks))
    if os.environ.get("RANK") != "0":
        return
    possible_hosts = [os.getpid()]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        possible_hosts.append(os.getppid())
    for problem in dict.fromkeys(raise_open_files(pid, world) for pid in possible_hosts):  # each once
        if problem:
            say(f"warning: {problem}", error=True)


def raise_open_files(pid: int, world: int) -> str | None:
    """Raise the soft limit of open files of the process `pid` to what the store of `world` ranks needs.

    Return None if the limit suffices, else a sentence that says what to do.
    """
    if not hasattr(resource, "prlimit"):  # only Linux can change the limits of another process
        return None
    store_files = FILES_PER_RANK * world
    need = store_files + OWN_FILES  # OWN_FILES is generous: a limit between the two numbers gives no warning
    try:
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY or soft >= need:
            return None
        # RLIM_INFINITY is -1, so min() would take it for the lower limit.
        new_limit = need if hard == resource.RLIM_INFINITY else min(need, hard)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (new_limit, hard))
    except OSError as error:  # such as a process of another user
        if store_files <= USUAL_LIMIT:
            return None  # the limit, which cannot be read, probably suffices
        return f"the limit of open files of process {pid}, which may host the store, cannot be raised: {error.strerror}"
    if new_limit >= store_files:
        return None
    return (
        f"the store of {world} ranks may need {need} open files, but the hard limit of its process is {hard}: before "
        f"the launch, raise the limit on the first node with ulimit -n {need} as root, LimitNOFILE={need} in a systemd "
        f"unit, or --ulimit nofile={need} for a container"
    )
