"""Advisory file locks (`flock`). The kernel releases a lock when the process that holds it ends.

On a local file system (see `is_local`), a free lock proves that its previous holder has ended. On other file systems it
proves nothing.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

# File systems that only one machine can mount at a time. So every process that sees a file there also sees its lock.
# On network and virtual file systems, a machine may not see the locks of other machines.
LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay"}
_held: set[int] = set()


def hold(handle: int) -> bool:
    """Lock the open file `handle` until `drop(handle)` or the end of this process; return True on success."""
    for _ in range(20):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)  # another process may hold the lock for microseconds, in is_held()
        except OSError:
            return False
        else:
            _held.add(handle)
            return True
    return False


def drop(handle: int) -> None:
    """Close the file `handle`; this also releases its lock."""
    _held.discard(handle)
    os.close(handle)


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[bool | None]:
    """Lock the file `path` within this context; yields True if it is locked, False if another process holds the lock.

    Yields None if the file cannot be opened or its file system has no locks.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        yield None
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_locked: bool | None = True
    except BlockingIOError:
        is_locked = False
    except OSError:
        is_locked = None
    try:
        yield is_locked
    finally:
        os.close(handle)


def is_held(path: Path) -> bool | None:
    """Return True if some process holds a lock on the file, False if not, None if this cannot be determined."""
    with exclusive(path) as is_locked:
        return None if is_locked is None else not is_locked


def is_local(path: Path) -> bool:
    """Return True if only this machine can mount the file system of `path`."""
    target = path.resolve()
    file_system = ""
    most_parts = -1
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            lines = file.readlines()
    except OSError:
        return False
    for line in lines:
        # For example `36 35 98:0 / /mnt/data rw - ext4 /dev/sda1 rw`: the mount point, and after the dash the type.
        mount_fields, _, type_fields = line.partition(b" - ")
        # mountinfo escapes a space as \040. The other bytes of a name, such as those of Chinese characters, stay.
        name = mount_fields.split(b" ")[4].decode("unicode_escape").encode("latin-1")
        mount = Path(os.fsdecode(name))
        # The innermost mount counts; of two at the same place, the later one hides the other.
        if (mount == target or mount in target.parents) and len(mount.parts) >= most_parts:
            file_system = type_fields.split()[0].decode()
            most_parts = len(mount.parts)
    return file_system in LOCAL


def _forget_in_child() -> None:
    """Close the locked files that a forked worker inherits, so that a worker that outlives the run holds no lock."""
    for handle in _held:
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
