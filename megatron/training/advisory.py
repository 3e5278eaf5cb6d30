"""Advisory locks (`flock`), which the kernel releases when the process that holds them ends.

On a local file system (`is_local`) a free lock proves that its holder has ended; on other file systems it does not.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

# Only one machine can mount these file systems at a time, so every process that sees a file on them sees its lock.
# Network and virtual file systems may keep each machine's locks separately.
LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay"}
_held: set[int] = set()


def hold(handle: int) -> bool:
    """Lock the open file `handle` until `drop` or the end of this process; return False if it cannot be locked."""
    for _ in range(20):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)  # another process may be probing the lock, for microseconds
        except OSError:
            return False
        else:
            _held.add(handle)
            return True
    return False


def drop(handle: int) -> None:
    """Close the file, which also releases its lock."""
    _held.discard(handle)
    os.close(handle)


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[bool | None]:
    """Lock a file inside the context. Yields True, or False if another process holds the lock.

    Yields None if the file cannot be opened or its file system has no locks.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        yield None
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        mine: bool | None = True
    except OSError as error:
        mine = False if isinstance(error, BlockingIOError) else None
    try:
        yield mine
    finally:
        os.close(handle)


def is_held(path: Path) -> bool | None:
    """Return whether some process holds a lock on the file, None if that is unknown."""
    with exclusive(path) as mine:
        return None if mine is None else not mine


def is_local(path: Path) -> bool:
    """Return whether no other machine can mount the file system of this file."""
    there = path.resolve()
    kind, longest = "", -1
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    for line in lines:
        before, _, after = line.partition(" - ")
        mount = Path(before.split()[4].encode().decode("unicode_escape"))  # mountinfo writes a space as \040
        if (mount == there or mount in there.parents) and len(mount.parts) >= longest:
            kind, longest = after.split()[0], len(mount.parts)
    return kind in LOCAL


def _forget_in_child() -> None:
    """Close inherited copies of locked files: a forked worker that outlives the run must not keep the run's lock."""
    for handle in _held:
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
