"""The meeting of the ranks: from the connection to the store until each rank is connected to all others.

torch ends a failed meeting at once on the rank that noticed the failure, and minutes to hours later on the others. Here
that rank writes what failed to the store, and a thread in each rank looks for it and for the end of the timeout.
"""

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch.distributed as dist

from .attempts import FAILED_KEY, LINGER_SECONDS, MeetingError, connect_to_store, limit_text, poll_seconds
from .diagnose import strip_cpp_stacks, watch_startup
from .heartbeat import watch_hosts
from .interfaces import INTERFACE_VARIABLE, choose_interface
from .messages import error_text, exit_with_error, shortened
from .parent_death import start_thread

GRACE_SECONDS = 10.0  # torch's own errors at the timeout say more, so they get these seconds
_PLACE_IN_SOURCE = re.compile(r"\[/\S+\.(cc|cpp|h):\d+\]")
_UNCONNECTED = re.compile(r"connect|socket|resolve|ncclSystemError|ncclRemoteError", re.IGNORECASE)


def connect_ranks(connect: Callable[[], None], timeout: timedelta, attempt: int) -> None:
    """Call `connect`, which joins the other ranks; then watch for faults of ranks and hosts.

    Raises MeetingError if the ranks cannot reach each other. timeout: how long a rank waits for the others. attempt:
    result of `enter_attempt`.
    """
    choose_interface()
    with fail_together(timeout, attempt):
        connect()
    watch_startup()
    watch_hosts()


@contextlib.contextmanager
def fail_together(timeout: timedelta, attempt: int) -> Iterator[None]:
    """Context in which the ranks connect to each other: if one rank fails, all end with a message.

    Raises MeetingError instead of the errors of torch's backends; errors of the store pass.
    timeout: after this time, a rank that still waits ends.
    """
    world = int(os.environ.get("WORLD_SIZE") or 1)
    # There is nobody to meet, the ranks have met, or the environment names no store.
    if world == 1 or dist.is_initialized() or os.environ.get("MASTER_PORT", "0") == "0":
        yield
        return
    failure_watch = _FailureWatch(timeout, world, attempt)
    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError):
        raise  # an error of the store itself: each rank gets it, or ends at the timeout
    except Exception as error:
        failure_watch.finished.set()  # this rank reports its own error
        is_connection_error = isinstance(error, RuntimeError) and _UNCONNECTED.search(error_text(error))
        if not is_connection_error:
            failure_watch.announce(f"{_rank_name()} raised {type(error).__name__}: {error}")
            raise
        message = describe_failure(error)
        failure_watch.announce(message)
        raise MeetingError(message) from error
    finally:
        failure_watch.finished.set()


def describe_failure(error: Exception) -> str:
    """Describe why this rank could not connect to the others, and what to do."""
    text = _PLACE_IN_SOURCE.sub("", strip_cpp_stacks(error_text(error)))
    text = shortened(" ".join(text.split()), 300)
    chosen = os.environ.get(INTERFACE_VARIABLE)
    return (
        f"{_rank_name()} reached the store, but could not connect to all other ranks ({text}): set "
        f"{INTERFACE_VARIABLE} (and NCCL_SOCKET_IFNAME) on each host to the interface that the other hosts reach; it "
        f"is {chosen or 'not set'} on {socket.gethostname()}"
    )


def _rank_name() -> str:
    """Return the name of this rank before the process group exists."""
    return f"rank {os.environ.get('RANK')} on {socket.gethostname()}"


class _FailureWatch:
    """Thread that ends this process if another rank has announced a failure, or when the time is up."""

    def __init__(self, timeout: timedelta, world: int, attempt: int) -> None:
        self.finished = threading.Event()
        self._timeout = timeout
        self._poll_seconds = poll_seconds(world)
        self._key = f"{FAILED_KEY}{attempt}"
        start_thread("tds-meeting", self._watch)

    def announce(self, message: str) -> None:
        """Write to the store why this rank ends, and give the others time to read it."""
        with contextlib.suppress(Exception):
            connect_to_store(self._timeout).set(self._key, message)
        time.sleep(max(LINGER_SECONDS, 2 * self._poll_seconds))

    def _watch(self) -> None:
        """End this process if the ranks are not connected in time; a second thread looks for failures of others."""
        seconds = self._timeout.total_seconds()
        # In another thread, because connecting to the store may take as long as the timeout.
        start_thread("tds-meeting", self._poll_failures)
        if not self.finished.wait(seconds + GRACE_SECONDS):
            exit_with_error(
                f"{_rank_name()} reached the store, but not all other ranks within {limit_text(self._timeout)}: check "
                f"the network between the hosts, and set {INTERFACE_VARIABLE} on each host to the interface that the "
                "other hosts reach"
            )

    def _poll_failures(self) -> None:
        """End this process when another rank has announced a failure."""
        with contextlib.suppress(Exception):  # the main thread waits for the same store, and reports the same error
            store = connect_to_store(self._timeout)
            while not self.finished.wait(self._poll_seconds):
                if store.check([self._key]):
                    exit_with_error(f"{_rank_name()} ends, as the ranks did not meet: {store.get(self._key).decode()}")
