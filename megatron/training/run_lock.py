"""One run at a time in a directory: a file `run.lock` that says which process on which machine writes there.

The file is made so that of two processes only one can make it, on shared file systems, too. A process that left one
behind by a crash is looked up by its id and start time, if this process sees the same table of processes. An advisory
lock on the file decides where it does not: in another container, or before the machine was restarted.
"""

import contextlib
import json
import os
import socket
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from tds.launched import process_table, started

from ..atomic import process_name
from . import advisory

NAME = "run.lock"
CHECKPOINTS = "the folder of checkpoints"
PATIENCE = 5.0  # seconds that ranks may take to notice that their launcher is gone


class RunLockedError(ValueError):
    """Another run uses the directory; the message says which."""


@dataclass(frozen=True)
class Holder:
    """The process that a lock is of."""

    host: str
    pid: int
    started: str  # see tds.launched.started
    since: str  # for people
    job: str = ""  # of SLURM, and which of its starts
    table: str = ""  # see tds.launched.process_table; "" in locks of older versions, too
    advisory: bool = False  # whether the process holds an advisory lock on the file

    @classmethod
    def here(cls) -> "Holder":
        """This process."""
        pid = os.getpid()
        job = os.environ.get("SLURM_JOB_ID", "")
        job += f" start {os.environ.get('SLURM_RESTART_COUNT', '0')}" if job else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        return cls(socket.gethostname(), pid, started(pid) or "", since, job, process_table())

    def same_process(self, other: "Holder") -> bool:
        """Whether both are one process."""
        mine, theirs = ((h.host, h.table, h.pid, h.started) for h in (self, other))
        return mine == theirs

    def is_visible(self, me: "Holder") -> bool:
        """Return whether `me` can look the process up: same machine, same boot, same PID namespace."""
        return bool(self.table) and (self.host, self.table) == (me.host, me.table)

    def is_gone(self, me: "Holder", path: Path) -> bool:
        """Return whether `me` knows that the process, which holds `path`, has ended.

        It knows if it sees the process, if that was in an earlier start of this SLURM job, or if the advisory lock is free
        although every process that can open the file would see it.
        """
        if self.is_visible(me):
            now = started(self.pid)
            return now is None or bool(now and self.started and now != self.started)
        if self.job and self.job != me.job and self.job.split()[0] == me.job.partition(" ")[0]:
            return True
        locks_are_seen = self._same_kernel(me) or advisory.is_local(path)
        return self.advisory and locks_are_seen and advisory.is_held(path) is False

    def is_alive(self, me: "Holder", path: Path) -> bool:
        """Return whether `me` knows that the process lives, given that it does not know that it has ended (`is_gone`)."""
        if self.is_visible(me):
            return True
        # Not gone, so its lock was held a moment ago; it may be free by now if another process was only asking.
        return self.advisory and self._same_kernel(me) and advisory.is_held(path) is not None

    def _same_kernel(self, me: "Holder") -> bool:
        return bool(self.table) and self.table.split()[0] == me.table.partition(" ")[0]

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class RunLock:
    """Holds a directory from `take` to `release`.

    notes: what was found and taken over, in sentences.
    """

    def __init__(self, folder: Path, override: bool = False, what: str = "the run directory") -> None:
        """Take it. Raises RunLockedError if another process has it, ValueError if the directory cannot be written.

        override: do so although the process of another machine that has it may live. what: the directory is, for messages.
        """
        self.path, self.notes = folder / NAME, list[str]()
        self._way_out = "another --save" if what == CHECKPOINTS else "another --run-dir"
        self._me, self._made = Holder.here(), list[Path]()
        self._handle: int | None = None  # holds the advisory lock while it is open
        try:
            self._make_folders(folder)
            self._take(override, time.monotonic() + PATIENCE)
        except OSError as error:
            self.release()
            raise ValueError(f"cannot write to {what} {folder}: {error.strerror}") from None
        except ValueError:
            self.release()
            raise

    def _make_folders(self, folder: Path) -> None:
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        self._made = missing

    def _take(self, override: bool, deadline: float) -> None:
        while not self._create():
            text = self._read()
            holder = _parse(text)
            if holder is None and text is not None and time.monotonic() > deadline - PATIENCE + 1:  # not half-written
                raise RunLockedError(f"{self.path} is damaged; delete it if no run uses {self.path.parent}")
            if text is None and time.monotonic() > deadline and self.path.is_symlink():
                raise RunLockedError(f"{self.path} is a link to nothing; delete it if no run uses {self.path.parent}")
            if holder is None or holder.same_process(self._me):
                if holder is not None:
                    return
            else:
                self._take_over(holder, text, override, deadline)
            time.sleep(0.1)

    def _take_over(self, holder: Holder, text: str | None, override: bool, deadline: float) -> None:
        """Remove the lock of a process that has ended. Raises RunLockedError for one that lives, or may live."""
        gone = holder.is_gone(self._me, self.path)
        alive = not gone and holder.is_alive(self._me, self.path)
        if gone or (override and not alive):
            late = time.monotonic() > deadline  # then a child that the process has left behind holds its advisory lock
            if self._remove(text, force=override or late):
                why = "has ended without a word" if gone else "may live, as --override-lock says it does not"
                self.notes.append(f"took over {self.path.parent} from {holder}, which {why}")
        elif not alive or time.monotonic() > deadline:
            raise RunLockedError(_refusal(self.path, holder, self._me, alive, self._way_out))

    def _create(self) -> bool:
        try:
            handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        try:
            # Lock first: a process that reads this holder must find the lock held.
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

    def _remove(self, judged: str | None, force: bool) -> bool:
        """Remove the lock whose content was `judged`; False if by now another process has taken it over, or is doing so.

        force: remove it even if its advisory lock is held.
        """
        with advisory.exclusive(self.path) as mine:
            # Of several processes that found one lock, only one removes it, and none removes the lock that it makes next.
            if (mine is False and not force) or (mine and self._read() != judged):
                return False
            aside = self.path.with_name(f"{NAME}.{process_name()}.tmp")
            try:
                os.rename(self.path, aside)
            except FileNotFoundError:
                return False
            if aside.read_text(encoding="utf-8", errors="replace") != judged:
                os.rename(aside, self.path)
                return False
            aside.unlink()
            return True

    def keep(self) -> None:
        """The run has begun: what was made for it stays."""
        self._made = []

    def release(self) -> None:
        """Let go of it, and of a directory that was made and has stayed empty; nothing if it is not ours (any more)."""
        with contextlib.suppress(OSError):
            holder = _parse(self._read())
            if holder is not None and holder.same_process(self._me):
                self.path.unlink()
        if self._handle is not None:
            advisory.drop(self._handle)
            self._handle = None
        with contextlib.suppress(OSError):
            for folder in self._made:
                folder.rmdir()
        self._made = []


def holder_of(path: Path) -> Holder | None:
    """Whom the lock `path` is of; None of one that is damaged or gone."""
    try:
        return _parse(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None


def _parse(text: str | None) -> Holder | None:
    try:
        content: dict[str, Any] = json.loads(text or "")
        known = {each.name for each in fields(Holder)}
        holder = Holder(**{key: value for key, value in content.items() if key in known})  # newer versions know more
        sound = isinstance(holder.pid, int) and holder.pid > 0
        return holder if sound and isinstance(holder.table, str) and isinstance(holder.job, str) else None
    except (AttributeError, TypeError, ValueError):
        return None


def _refusal(path: Path, holder: Holder, me: Holder, alive: bool, other: str) -> str:
    elsewhere = holder.host == me.host and not holder.is_visible(me)
    where = ", in another container or before a restart of the machine" if elsewhere and not alive else ""
    where = ", in another container" if elsewhere and alive else where
    way_out = f"end it, or give {other}" if alive else f"if it has ended, --override-lock continues (or delete {path})"
    return f"{path.parent} is in use by {holder}{where}: {way_out}"
