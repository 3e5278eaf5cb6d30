"""A journal on disk of a long job's progress, so that the job can resume after it was killed."""

import fcntl
import hashlib
import json
import os
from pathlib import Path
from typing import Any, TextIO

from megatron.atomic import write_text
from megatron.json_text import read_json


def _open_locked(path: str) -> TextIO:
    """Open a file and lock it until it is closed. Raises ValueError if another process holds the lock."""
    while True:
        lock = open(path, "w")  # noqa: SIM115
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # If another process has deleted the file between open and lock, the lock protects nothing: try again.
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(path)):
                return lock
        except BlockingIOError:
            lock.close()
            raise ValueError(f"another run is writing the same output; it holds the lock {path}") from None
        except FileNotFoundError:
            pass  # another process deleted the file between open and lock, so try again
        except OSError as error:
            lock.close()
            raise ValueError(
                f"cannot lock {path}: {error.strerror}; write to a file system that supports locks"
            ) from None
        lock.close()  # the lock of a deleted file; open and lock the present one


class Journal:
    """JSON file with the progress of a job. It is replaced atomically, and only one process at a time can open it.

    job: all inputs and settings that determine the output. state: progress of an interrupted run, None for a new job.
    Raises ValueError if another run has the journal open, or if the journal belongs to a different job.
    """

    def __init__(self, path: str, job: dict[str, Any]) -> None:
        self.path = path
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._lock = _open_locked(f"{path}.lock")
        self._key = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()
        self.state: dict[str, Any] | None = None
        if os.path.exists(path):
            try:
                content = read_json(Path(path), dict)
                owner = content["job"]
                self.state = content["state"]
            except (ValueError, KeyError):
                self.release()
                raise ValueError(f"{path} is damaged; delete it to start again") from None
            if owner != self._key:
                self.release()
                raise ValueError(
                    f"{path} belongs to a run with other settings or other input; delete it to start again"
                )

    def write(self, state: dict[str, Any]) -> None:
        """Replace the journal by one that records `state`, atomically and durably."""
        write_text(self.path, json.dumps({"job": self._key, "state": state}), synced=True)

    def remove(self) -> None:
        """Delete the journal of a completed job."""
        Path(self.path).unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Release the lock, so that another process can write the output."""
        Path(f"{self.path}.lock").unlink(missing_ok=True)
        self._lock.close()
