"""One run at a time in a directory: a file `run.lock` that says which process on which machine writes there.

The file is made so that of two only one can make it, on shared file systems, too. Who left one behind by a
crash on the same machine is found out by its process id and the time it was started.
"""

import contextlib
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tds.launched import started

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

    @classmethod
    def here(cls) -> "Holder":
        """This process."""
        pid = os.getpid()
        job = os.environ.get("SLURM_JOB_ID", "")
        job += f" start {os.environ.get('SLURM_RESTART_COUNT', '0')}" if job else ""
        return cls(socket.gethostname(), pid, started(pid) or "", time.strftime("%Y-%m-%d %H:%M:%S"), job)

    def same_process(self, other: "Holder") -> bool:
        """Whether both are one process."""
        return (self.host, self.pid, self.started) == (other.host, other.pid, other.started)

    def is_gone(self, me: "Holder") -> bool:
        """Whether I can tell that the process has ended: on this machine, or in an earlier start of this SLURM job."""
        if self.host != me.host:
            return bool(self.job and self.job != me.job and self.job.split()[0] == me.job.partition(" ")[0])
        now = started(self.pid)
        return now is None or bool(now and self.started and now != self.started)

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
            elif holder.is_gone(self._me) or (override and holder.host != self._me.host):
                if self._remove(text):
                    gone = (
                        "has ended without a word"
                        if holder.is_gone(self._me)
                        else "may live, as --override-lock says it does not"
                    )
                    self.notes.append(f"took over {self.path.parent} from {holder}, which {gone}")
            elif time.monotonic() > deadline or holder.host != self._me.host:
                raise RunLockedError(_refusal(self.path, holder, self._me.host, self._way_out))
            time.sleep(0.1)

    def _create(self) -> bool:
        try:
            handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        try:
            os.write(handle, json.dumps(asdict(self._me)).encode())
            os.fsync(handle)
        except OSError:
            self.path.unlink()
            raise
        finally:
            os.close(handle)
        return True

    def _read(self) -> str | None:
        try:
            return self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None

    def _remove(self, judged: str | None) -> bool:
        """Clear away the lock that was looked at; False if by now it is somebody else's, who was faster."""
        aside = self.path.with_name(f"{NAME}.{self._me.host}.{self._me.pid}.tmp")
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
        holder = Holder(**content)
        return holder if isinstance(holder.pid, int) and holder.pid > 0 else None
    except (TypeError, ValueError):
        return None


def _refusal(path: Path, holder: Holder, here: str, other: str) -> str:
    way_out = (
        f"end it, or give {other}"
        if holder.host == here
        else f"if it has ended, --override-lock goes on (or delete {path})"
    )
    return f"{path.parent} is in use by {holder}: {way_out}"
