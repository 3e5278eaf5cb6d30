"""Advisory file locks (`flock`). The kernel releases a lock when the process that holds it ends."""

import contextlib
import fcntl
import os
import subprocess
import weakref
from io import FileIO
from pathlib import Path

# File systems that only one machine can mount at a time, by their names in `stat`. On network and virtual file systems,
# a machine may not see the locks of other machines.
LOCAL = {"ext2/ext3", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlayfs"}
_locked_files: weakref.WeakSet[FileIO] = weakref.WeakSet()


def open_locked(path: Path) -> FileIO:
    """Open a file for reading and writing, create it if it does not exist, and lock it until it is closed.

    Raises BlockingIOError if another process holds the lock. If the file system has no locks, no process holds one.
    """
    file = FileIO(path, "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise
    except OSError:
        pass  # ENOLCK, ENOSYS, EOPNOTSUPP or EINVAL: no locks
    # `is_held_here` finds the locks of this process in this set, and a forked worker closes its copies of these files.
    _locked_files.add(file)
    return file


def is_held(path: Path) -> bool | None:
    """Return True if a process has locked the file, False if not, None if the file or its lock cannot be read."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # on NFS, LOCK_EX needs a file that is open for writing
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def is_held_here(path: Path) -> bool:
    """Return True if this process has locked the file."""
    open_files = [file.fileno() for file in _locked_files if not file.closed]
    return path.exists() and any(os.path.samefile(number, path) for number in open_files)


def is_local(folder: Path) -> bool:
    """Return True if only this machine can mount the file system of `folder`."""
    with contextlib.suppress(OSError):
        command = ["stat", "--file-system", "--format=%T", str(folder)]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() in LOCAL
    return False


def _close_in_child() -> None:
    """Close the locked files that a forked worker inherits, so that a worker that outlives the run holds no lock."""
    for file in _locked_files:
        file.close()


os.register_at_fork(after_in_child=_close_in_child)
