"""A file or a folder appears whole under its name, or not at all: it is written under a temporary name, then renamed."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TOKEN = secrets.token_hex(4)


def process_name() -> str:
    """Return a name that no other process has. A process id is not enough: each container counts from 1."""
    return f"{os.getpid()}-{_TOKEN}"


def temporary_name(path: Path) -> Path:
    """Return a path next to `path` that only this process uses."""
    return path.with_name(f"{path.name}.{process_name()}.tmp")


@contextmanager
def whole_file(path: str | Path, temporary: Path | None = None) -> Iterator[Path]:
    """Around the writing of a file: where to write, which gets its name `path` afterwards; after an error it is gone."""
    there = temporary or temporary_name(Path(path))
    try:
        yield there
        os.replace(there, path)
    except BaseException:
        there.unlink(missing_ok=True)
        raise


def write_text(path: str | Path, text: str, synced: bool = False, temporary: Path | None = None) -> None:
    """synced: it is on the disk, not only with the system, before it has its name."""
    with whole_file(path, temporary) as there, open(there, "w", encoding="utf-8") as file:
        file.write(text)
        if synced:
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """The same for a folder, which must not be there yet, or be empty. Raises FileExistsError."""
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} exists and is not empty; choose another folder")
    there = temporary_name(folder)
    there.mkdir(parents=True)
    try:
        yield there
        if folder.exists():
            folder.rmdir()
        there.rename(folder)
    finally:
        shutil.rmtree(there, ignore_errors=True)
