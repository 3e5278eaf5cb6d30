"""Lock file `run.lock`, which lets only one run at a time use a directory. It names the run's process and machine.

Only one process can create the file, even on a shared file system. After a crash, the file remains. A new run then
checks whether the named process still runs. If that process is in the same process table, the new run looks it up by id
and start time. Otherwise (another container, or a reboot since then), it tests an advisory lock on the file.
"""

import contextlib
import json
import os
import socket
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from tds.parent_death import process_table, start_time_of

from ..atomic import process_name, why_missing
from ..json_text import parse_json
from . import advisory

LOCK_FILE = "run.lock"
CHECKPOINTS = "the folder of checkpoints"
PATIENCE = 5.0  # seconds to wait for a lock; the ranks of a killed run may take this long to end


class RunLockedError(ValueError):
    """Error for a directory that another run uses; the message names the process of the other run."""


@dataclass(frozen=True)
class Holder:
    """Process that holds a lock, as described in the lock file."""

    host: str
    pid: int
    started: str  # start time of the process in kernel ticks (tds.parent_death.start_time_of)
    since: str  # date and time of the start, used only in messages
    job: str = ""  # SLURM job id and restart count; "" outside SLURM
    table: str = ""  # boot id and PID namespace (tds.parent_death.process_table); "" in lock files of older versions
    advisory: bool = False  # True if the process holds an advisory lock on the file

    @classmethod
    def here(cls) -> "Holder":
        """Return a description of this process."""
        pid = os.getpid()
        job = os.environ.get("SLURM_JOB_ID", "")
        if job:
            job += f" start {os.environ.get('SLURM_RESTART_COUNT', '0')}"
        started = start_time_of(pid) or ""
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        return cls(socket.gethostname(), pid, started, since, job, process_table())

    def same_process(self, other: "Holder") -> bool:
        """Return True if this holder and `other` are the same process."""
        same_machine = (self.host, self.table) == (other.host, other.table)
        return same_machine and (self.pid, self.started) == (other.pid, other.started)

    def is_visible(self, me: "Holder") -> bool:
        """Return True if the process `me` can look this holder up: same machine, same boot, same PID namespace."""
        return bool(self.table) and (self.host, self.table) == (me.host, me.table)

    def is_gone(self, me: "Holder", path: Path) -> bool:
        """Return True if the process `me` can be sure that this holder of the lock `path` has ended.

        There are three such cases. The holder is no longer in the process table of `me`. The holder belonged to an
        earlier start of the same SLURM job. The advisory lock is free, although `me` would see a lock of the holder.
        """
        if self.is_visible(me):
            start_now = start_time_of(self.pid)
            if start_now is None:
                return True
            # Another start time means that the system gave the id to a later process. "" means that it is unknown.
            return bool(start_now and self.started and start_now != self.started)
        same_job = _first_word(self.job) == _first_word(me.job)
        if self.job and same_job and self.job != me.job:  # SLURM ends a start of a job before it restarts the job
            return True
        if not self.advisory:
            return False
        locks_are_seen = self._same_kernel(me) or advisory.is_local(path)
        return locks_are_seen and advisory.is_held(path) is False

    def is_alive(self, me: "Holder", path: Path) -> bool:
        """Return True if the process `me` can be sure that this holder still runs. Call it if `is_gone` is False."""
        if self.is_visible(me):
            return True
        # `is_gone` has just found the advisory lock held. If the lock is free by now, another process held it only to
        # test it, and the next call of `is_gone` will return True.
        return self.advisory and self._same_kernel(me) and advisory.is_held(path) is not None

    def _same_kernel(self, me: "Holder") -> bool:
        return bool(self.table) and _first_word(self.table) == _first_word(me.table)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


def _first_word(text: str) -> str:
    return text.partition(" ")[0]


def _device_and_inode(folder: Path) -> tuple[int, int] | None:
    """Return device and inode of a folder, None if it does not exist."""
    try:
        stat = folder.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


def has_files(folder: Path) -> bool:
    """Return whether a folder contains a file other than a lock, in itself or in a folder below it."""
    return any(path.name != LOCK_FILE for path in folder.rglob("*") if not path.is_dir())


class RunLock:
    """Lock of a directory, held from construction until `release`.

    notes: sentences for the user, one for each lock that this object took over from another process.
    """

    def __init__(self, folder: Path, override: bool = False, what: str = "the run directory") -> None:
        """Take the lock of `folder`, and create the folder if it does not exist.

        Raises RunLockedError if another process holds the lock, and ValueError if the folder is not writable.
        override: take the lock even if its holder, on another machine, may still run.
        what: name of the folder in messages.
        """
        self.path = folder / LOCK_FILE
        self.notes: list[str] = []
        self._other_flag = "another --save" if what == CHECKPOINTS else "another --run-dir"
        self._me = Holder.here()
        self._created_folders: list[Path] = []
        self._handle: int | None = None  # open file that holds the advisory lock
        try:
            self._make_folders(folder)
            self._acquire(override, time.monotonic() + PATIENCE)
            self._folder_id = _device_and_inode(folder)
        except OSError as error:
            self.release()
            raise ValueError(f"cannot write to {what} {folder}: {error.strerror}") from None
        except ValueError:
            self.release()
            raise

    def _make_folders(self, folder: Path) -> None:
        missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
        for parent in missing:
            if parent.is_symlink():
                raise ValueError(f"{parent} {why_missing(parent)}: create the folder there, or remove the link")
        if self.path.is_dir():
            raise ValueError(f"{self.path} is a folder, but must be the lock file of a run: remove it")
        folder.mkdir(parents=True, exist_ok=True)
        self._created_folders = missing

    def _acquire(self, override: bool, deadline: float) -> None:
        while not self._create():
            text = self._read()
            holder = _parse(text)
            if holder is None:
                self._check_damaged(text, deadline)
            elif holder.same_process(self._me):
                return  # another lock of this process holds the file
            else:
                self._take_over(holder, text, override, deadline)
            time.sleep(0.1)

    def _check_damaged(self, text: str | None, deadline: float) -> None:
        """Raise RunLockedError if the lock file, whose content is `text`, is damaged and not only half-written."""
        now = time.monotonic()
        problem = ""
        # The wait began at deadline - PATIENCE. A file that is unreadable for more than a second is not half-written.
        if text is not None and now > deadline - PATIENCE + 1:
            problem = "damaged"
        elif text is None and now > deadline and self.path.is_symlink():
            problem = "a broken symbolic link"
        if problem:
            raise RunLockedError(f"{self.path} is {problem}; delete it if no run uses {self.path.parent}")

    def _take_over(self, holder: Holder, text: str | None, override: bool, deadline: float) -> None:
        """Remove the lock of a process that has ended. Raises RunLockedError if the process runs or may run."""
        past_deadline = time.monotonic() > deadline
        reason = "has ended without releasing it"
        if not holder.is_gone(self._me, self.path):
            alive = holder.is_alive(self._me, self.path)
            if alive and not past_deadline:
                return  # `_acquire` tries again until the deadline
            if alive or not override:
                raise RunLockedError(_in_use_message(self.path, holder, self._me, alive, self._other_flag))
            reason = "may still run (--override-lock)"
        # After the deadline, only an orphaned child of the ended process can still hold the advisory lock.
        if self._remove(text, force=override or past_deadline):
            self.notes.append(f"took over {self.path.parent} from {holder}, which {reason}")

    def _create(self) -> bool:
        try:
            handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        try:
            # Take the advisory lock before writing: a process that reads this record must find the lock held.
            me = replace(self._me, advisory=advisory.hold(handle))
            os.write(handle, json.dumps(asdict(me)).encode())
            os.fsync(handle)
        except OSError:
            self.path.unlink()
            advisory.drop(handle)
            raise
        self._handle = handle
        return True

    def _read(self) -> str | None:
        try:
            return self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None

    def _remove(self, expected_text: str | None, force: bool) -> bool:
        """Remove the lock file unless another process takes the lock over; return True if the file was removed.

        expected_text: content of the lock file when its process was found to have ended.
        force: remove the file even if its advisory lock is held.
        """
        with advisory.exclusive(self.path) as is_locked:
            # Several processes may find the same lock of an ended process. Only one of them removes this lock file, and
            # none of them removes the lock file that the next run creates.
            if (is_locked is False and not force) or (is_locked and self._read() != expected_text):
                return False
            moved_file = self.path.with_name(f"{LOCK_FILE}.{process_name()}.tmp")
            try:
                os.rename(self.path, moved_file)
            except FileNotFoundError:
                return False
            if moved_file.read_text(encoding="utf-8", errors="replace") != expected_text:
                os.rename(moved_file, self.path)
                return False
            moved_file.unlink()
            return True

    def is_lost(self) -> bool:
        """Return True if the lock file at this path is no longer the one that this object has made.

        Some network file systems change the numbers of files, so the content of the file decides in the end.
        """
        if self._handle is None:
            return False  # another lock of this process holds the file
        own_file = os.fstat(self._handle)
        try:
            file_at_path = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False  # the file system fails, which says nothing about the file
        # st_nlink is 0 if the own file was deleted; its number may then belong to another file.
        if own_file.st_nlink and (own_file.st_dev, own_file.st_ino) == (file_at_path.st_dev, file_at_path.st_ino):
            return False
        holder = read_holder(self.path)
        return holder is None or not holder.same_process(self._me)

    def take_back(self) -> bool:
        """Take a lost lock again, in the same folder or in a new or empty one of this name; return True on success.

        A folder that contains anything may belong to another run, even if that run has ended.
        """
        old_handle = self._handle  # `_create` replaces it
        folder = self.path.parent
        if _device_and_inode(folder) != self._folder_id and has_files(folder):
            return False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            is_taken = self._create()
        except OSError:
            is_taken = False
        if is_taken and old_handle is not None:
            advisory.drop(old_handle)
        return is_taken

    def why_not_free(self) -> str:
        """Return why `take_back` failed, as the end of a sentence that begins with the folder."""
        holder = read_holder(self.path)
        if holder is not None:
            return f"is in use by {holder}"
        return "has files of another run" if has_files(self.path.parent) else "cannot be used"

    def keep_folders(self) -> None:
        """Mark the run as started, so that `release` does not delete the folders that were created for the lock."""
        self._created_folders = []

    def release(self) -> None:
        """Remove the lock file if this process holds the lock, and the empty folders that were created for the lock."""
        with contextlib.suppress(OSError):
            holder = read_holder(self.path)
            if holder is not None and holder.same_process(self._me):
                self.path.unlink()
        if self._handle is not None:
            advisory.drop(self._handle)
            self._handle = None
        with contextlib.suppress(OSError):
            for folder in self._created_folders:  # innermost first; rmdir fails if a folder is not empty
                folder.rmdir()
        self._created_folders = []


def read_holder(path: Path) -> Holder | None:
    """Return the holder of the lock file `path`, or None if the file is damaged or does not exist."""
    try:
        return _parse(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None


def _parse(text: str | None) -> Holder | None:
    try:
        content: dict[str, Any] = parse_json(text or "", "the lock")
        # A lock file of a newer version may have more fields.
        for name in content.keys() - {field.name for field in fields(Holder)}:
            del content[name]
        holder = Holder(**content)
    except (AttributeError, TypeError, ValueError):
        return None
    return holder if _is_sound(holder) else None


def _is_sound(holder: Holder) -> bool:
    has_texts = isinstance(holder.table, str) and isinstance(holder.job, str)
    return has_texts and isinstance(holder.pid, int) and holder.pid > 0


def _in_use_message(path: Path, holder: Holder, me: Holder, alive: bool, other_flag: str) -> str:
    """Return the error message for a lock that `holder` holds.

    alive: whether the holder surely runs. other_flag: advice to use another folder, such as `another --run-dir`.
    """
    location = ""
    if holder.host == me.host and not holder.is_visible(me):
        location = ", in another container"
        if not alive:
            location += " or before a restart of the machine"
    advice = f"if it has ended, pass --override-lock (or delete {path})"
    if alive:
        advice = f"end it, or give {other_flag}; if this folder is a copy of the folder of that run, delete {path}"
    return f"{path.parent} is in use by {holder}{location}: {advice}"
