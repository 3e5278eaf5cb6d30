"""Lock file `run.lock`, which lets only one run at a time use a directory.

A run holds an advisory lock on the file (advisory.py). The kernel releases this lock when the process ends, so after a
crash the next run can take it. The content of the file names the holder in messages. It decides only if a lock of
another machine may be invisible (`may_still_run`).
"""

import contextlib
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path

from ..atomic import why_missing
from ..json_text import parse_json
from . import advisory

LOCK_FILE = "run.lock"
CHECKPOINTS = "the folder of checkpoints"
PATIENCE = 5.0  # seconds to wait for a lock; the ranks of a killed run may take this long to end


class RunLockedError(ValueError):
    """Error for a directory that another run uses; the message names the process of the other run."""


@dataclass(frozen=True)
class Holder:
    """Process that holds a lock, as described in the lock file; without arguments, an unknown process."""

    host: str = ""
    pid: int = 0
    since: str = ""  # date and time at which it took the lock
    job: str = ""  # SLURM job id

    @classmethod
    def here(cls) -> "Holder":
        """Return a description of this process."""
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        return cls(socket.gethostname(), os.getpid(), since, os.environ.get("SLURM_JOB_ID", ""))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}" if self.pid else "another process"


def read_holder(path: Path) -> Holder | None:
    """Return the process that the lock file names, None if the file is empty or does not exist.

    Return Holder(), an unknown process, if the file cannot be read or its content is not a record.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if not text:
            return None
        record = parse_json(text, "the lock", dict)  # a lock file of another version may have more fields
        job = record.get("job", "")
        return Holder(record["host"], record["pid"], record["since"], job)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, LookupError, ValueError):
        return Holder()


def may_still_run(holder: Holder, path: Path) -> bool:
    """Return whether a process that the lock file names, but whose lock is not seen, may still run.

    Some file systems have no locks. Others, such as Lustre with `localflock` and some FUSE file systems, show a lock
    only on the machine of its holder.
    """
    me = Holder.here()
    has_locks = advisory.is_held(path) is not None
    if holder.host == me.host:  # the lock would be seen here, unless the file system has no locks
        process = Path(f"/proc/{holder.pid}")
        return process.exists() and not has_locks
    if holder.job and holder.job == me.job:
        return False  # an earlier start, which SLURM ended before it started the job again
    all_locks_are_seen = has_locks and advisory.is_local(path.parent)
    return not all_locks_are_seen


def living_holder(path: Path) -> Holder | None:
    """Return the process that holds the lock file or may hold it, None if the next run can take the lock."""
    holder = read_holder(path)
    if advisory.is_held(path):
        return holder or Holder()
    return holder if holder and may_still_run(holder, path) else None


def has_files(folder: Path) -> bool:
    """Return whether a folder contains a file other than a lock, in itself or in a folder below it."""
    return any(path.name != LOCK_FILE for path in folder.rglob("*") if not path.is_dir())


class RunLock:
    """Lock of a directory, held from construction until `release`.

    notes: a sentence for the user if this object took the lock over from another process.
    """

    def __init__(self, folder: Path, override: bool = False, what: str = "the run directory") -> None:
        """Take the lock of `folder`, and create the folder if it does not exist.

        Raises RunLockedError if another process holds the lock, and ValueError if the folder is not writable.
        override: take the lock although a process whose lock is not seen may still run.
        what: name of the folder in messages.
        """
        self.path = folder / LOCK_FILE
        self.notes: list[str] = []
        self._me = Holder.here()
        self._created_folders: list[Path] = []
        self._file: FileIO | None = None  # None if another lock of this process holds the file
        try:
            self._make_folders(folder)
            if not advisory.is_held_here(self.path):
                self._acquire(override)
            self._folder_status = os.stat(folder)
        except OSError as error:
            self.release()
            raise ValueError(f"cannot write to {what} {folder}: {error.strerror}") from None
        except ValueError:
            self.release()
            raise

    def _make_folders(self, folder: Path) -> None:
        missing = []
        for parent in (folder, *folder.parents):
            if parent.exists():
                break
            if parent.is_symlink():
                raise ValueError(f"{parent} {why_missing(parent)}: create the folder there, or remove the link")
            missing.append(parent)
        if self.path.is_dir() or self.path.is_symlink():
            raise ValueError(f"{self.path} is a folder or a link, but must be the lock file of a run: remove it")
        folder.mkdir(parents=True, exist_ok=True)
        self._created_folders = missing

    def _acquire(self, override: bool) -> None:
        """Take the lock. Raises RunLockedError if another process holds it for PATIENCE seconds, or may hold it."""
        deadline = time.monotonic() + PATIENCE
        while not self._try(override):
            if time.monotonic() > deadline:
                holder = read_holder(self.path) or Holder()
                advice = (
                    f"end it, or give another --run-dir (another --save if that names {self.path.parent}); "
                    f"if its machine is down, or this folder is a copy, delete {self.path}"
                )
                raise self._in_use(holder, advice)
            time.sleep(0.1)

    def _try(self, override: bool) -> bool:
        """Lock the file and write a record; return False if another process holds the lock or has removed the file."""
        try:
            file = advisory.open_locked(self.path)
        except BlockingIOError:
            return False
        # The lock is free. A record means that a process crashed, or that its lock cannot be seen on this machine.
        holder = read_holder(self.path)
        if holder is not None:
            if not override and may_still_run(holder, self.path):
                file.close()
                raise self._in_use(holder, f"if it has ended, pass --override-lock (or delete {self.path})")
            self.notes = [f"took over {self.path.parent} from {holder}, which no longer holds its lock"]
        if self._file is not None:
            self._file.close()  # a file that this object has lost
        self._file = file
        file.truncate(0)
        file.write(json.dumps(asdict(self._me)).encode())
        os.fsync(file)
        return not self.is_lost()  # lost if the earlier holder has removed this file since it was opened

    def _in_use(self, holder: Holder, advice: str) -> RunLockedError:
        return RunLockedError(f"{self.path.parent} is in use by {holder}: {advice}")

    def is_lost(self) -> bool:
        """Return True if the file at this path is no longer the one that this object has locked.

        The record in the file decides, since some network file systems change the numbers of files. A file that cannot
        be read is not lost: the file system may fail for a moment.
        """
        return self._file is not None and read_holder(self.path) not in (self._me, Holder())

    def take_back(self) -> str:
        """Take a lost lock again, in the same folder or in a new or empty one of this name.

        Return "" on success, else the reason, as the end of a sentence that begins with the folder. A folder that
        contains anything may belong to another run, even if that run has ended.
        """
        folder = self.path.parent
        holder = read_holder(self.path)
        if holder is not None:
            return f"is in use by {holder}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if has_files(folder) and not os.path.samestat(os.stat(folder), self._folder_status):
                return "has files of another run"
            self._acquire(override=False)
        except (OSError, RunLockedError):
            return "cannot be used"
        return ""

    def keep_folders(self) -> None:
        """Mark the run as started, so that `release` does not delete the folders that were created for the lock."""
        self._created_folders = []

    def release(self) -> None:
        """Remove the lock file if this object holds the lock, and the empty folders that were created for the lock."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                if not self.is_lost():
                    self._file.truncate(0)  # a process that waits for this file must find no holder in it
                    self.path.unlink()
            self._file.close()
            self._file = None
        with contextlib.suppress(OSError):
            for folder in self._created_folders:  # innermost first; rmdir fails if a folder is not empty
                folder.rmdir()
        self._created_folders = []
