"""Atomic writes of files and folders: they are written under a temporary name, then renamed."""

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_RANDOM_SUFFIX = secrets.token_hex(4)


def process_name() -> str:
    """Return a name unique to this process.

    A process id alone is not unique, because every container numbers its processes from 1.
    """
    return f"{os.getpid()}-{_RANDOM_SUFFIX}"


def temporary_name(path: Path) -> Path:
    """Return a path next to `path` that only this process uses."""
    return path.with_name(f"{path.name}.{process_name()}.tmp")


def why_missing(path: Path) -> str:
    """Return why `path` cannot be read although something refers to it, as the end of a sentence."""
    if path.is_symlink() and not path.exists():
        return f"is a link to {path.readlink()}, where nothing is"
    return "is missing"


@contextmanager
def name_in_errors(path: str | Path) -> Iterator[None]:
    """Add `path` to an error of the system that is raised in this context and names no file.

    Errors of an open file, such as a full disk, lack the file's name. Errors without a number have a message of their
    own, which a file name would replace.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = error.filename or str(path)
        raise


def remove(path: Path) -> None:
    """Remove a file, a folder or a link, but never a link's target; do nothing if it does not exist. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def private_temp_folder(name: str) -> Path:
    """Return a private temporary folder of this user. Raises ValueError if other users could have put files there."""
    path = Path(tempfile.gettempdir()) / f"{name}-{os.getuid()}"
    with contextlib.suppress(FileExistsError):  # the checks below refuse anything else than a private folder
        path.mkdir(mode=0o700)
    status = path.lstat()  # unlike stat, it does not follow a link, which another user could have put there
    if not stat.S_ISDIR(status.st_mode):
        raise ValueError(f"{path} is a link or a file, not a folder; remove it, or set TMPDIR to a private folder")
    if status.st_uid != os.getuid():
        raise ValueError(f"{path} belongs to another user; set TMPDIR to a private folder")
    if status.st_mode & 0o022:  # write permission of the group or of others
        raise ValueError(f"{path} is writable by other users; run chmod 700 on it, or set TMPDIR to a private folder")
    return path


def fsync_path(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold a lock among the processes of this node. path: its file, on local disk, as some shared disks lack locks."""
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def atomic_file(path: str | Path, temporary: Path | None = None) -> Iterator[Path]:
    """Yield a temporary path to write to; rename it to `path` afterwards, or delete it after an error.

    An OSError names `path`, not the temporary path.
    temporary: temporary path to use; by default, one that only this process uses.
    """
    if os.path.isdir(path):  # os.replace would refuse it, too, but only after the caller has written the file
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    temporary_path = temporary or temporary_name(Path(path))
    try:
        with name_in_errors(path):
            yield temporary_path
            os.replace(temporary_path, path)
    except BaseException as error:  # also after Ctrl-C, no temporary file may stay
        temporary_path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(temporary_path):
            error.filename = str(path)
        raise


def copy_file(source: Path, target: Path) -> None:
    """Copy a small file atomically. An OSError names the file that could not be read or written."""
    with name_in_errors(source):
        data = source.read_bytes()
    with atomic_file(target) as temporary_path:
        temporary_path.write_bytes(data)


def append_or_restore(path: Path, text: str) -> None:
    """Append `text` to a file. If this fails, restore the previous size of the file and raise OSError."""
    with open(path, "ab", buffering=0) as file:
        size = file.tell()
        data = text.encode()
        try:
            if file.write(data) != len(data):  # without a buffer, a nearly full disk takes a part of the data
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(size)
            raise


def write_text(path: str | Path, text: str, synced: bool = False, temporary: Path | None = None) -> None:
    """Write `text` to `path` atomically.

    synced: flush the data to disk before the rename. temporary: see `atomic_file`.
    """
    with atomic_file(path, temporary) as temporary_path:
        # A crash may have left a file at this path. If it were a link, opening it would write to the link's target.
        temporary_path.unlink(missing_ok=True)
        with open(temporary_path, "x", encoding="utf-8") as file:
            file.write(text)
        if synced:
            fsync_path(temporary_path)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill; rename it to `folder` afterwards, or delete it after an error.

    Raises FileExistsError if `folder` exists and is not empty, or cannot be replaced.
    """
    folder = folder.resolve()
    if folder.is_mount():
        raise FileExistsError(f"{folder} is a mount point, which cannot be replaced; choose a folder inside it")
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} exists and is not empty; choose another folder")
    temporary_path = temporary_name(folder)
    temporary_path.mkdir(parents=True)
    try:
        with name_in_errors(folder):
            yield temporary_path
        if folder.exists():
            folder.rmdir()  # it is empty, as checked above
        temporary_path.rename(folder)
    finally:
        shutil.rmtree(temporary_path, ignore_errors=True)
