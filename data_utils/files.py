"""Which files are read, in which order, and which are not."""

import glob
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from .streams import COMPRESSED, InputError, is_utf8

SUFFIXES = (".jsonl", ".ndjson", ".json", ".txt", ".csv", ".parquet")
KINDS = f"{', '.join(SUFFIXES)} (plain, {', '.join(COMPRESSED)})"
NAMED = 3  # of the files that are not read


class Source(NamedTuple):
    """A file, how often each of its documents is taken (0.5: every second one at random), its place among all, its encoding."""

    path: str
    weight: float = 1.0
    number: int = 0
    encoding: str = "utf-8"


def _to_stderr(message: str) -> None:
    print(message, file=sys.stderr)


def find_files(inputs: Sequence[str], encoding: str = "utf-8", say: Callable[[str], None] = _to_stderr) -> list[Source]:
    """The text files that `inputs` name, in the order of the inputs and there by name.

    An input is a file, a folder (searched through, but for what is hidden) or a glob pattern, and may end with
    `@WEIGHT`. say: is told which files of folders and patterns are of no kind that is read.
    Raises InputError for what does not exist, cannot be read, or is of an unknown kind.
    """
    is_utf8(encoding)
    files: list[Source] = []
    for given in inputs:
        name, weight = _weight(given)
        path = Path(name)
        if path.is_dir():
            found = _known(name, _there(p for p in path.rglob("*") if not _hidden(p.relative_to(path))), say)
            if not found:
                raise InputError(f"the folder {name} holds no file of {KINDS}")
        elif glob.has_magic(name) and not path.exists():
            found = _known(name, _there(map(Path, glob.glob(name, recursive=True))), say)
            if not found:
                raise InputError(f"no file of {KINDS} matches {name}")
        else:
            found = [name]
        for each in found:
            _check_file(each)
            files.append(Source(each, weight, len(files), encoding))
    return files


def absent(inputs: Sequence[str]) -> list[str]:
    """The inputs that are neither a file, nor a folder, nor a pattern, nor `-`; each may end with `@WEIGHT`."""
    names = [_weight(given)[0] for given in inputs]
    return [name for name in names if name != "-" and not glob.has_magic(name) and not os.path.exists(name)]


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _there(paths: Iterable[Path]) -> Iterator[Path]:
    """The files among them. Raises InputError for a link to nothing, such as to a disk that is not mounted."""
    for path in paths:
        if path.is_symlink() and not path.exists():
            raise InputError(f"{path} is a link to {os.readlink(path)}, which is not there")
        if path.is_file():
            yield path


def refuse_as_outputs(inputs: Sequence[str], outputs: Sequence[str | None], encoding: str = "utf-8") -> None:
    """Raise InputError if something would be written over what is read, or two outputs over each other."""
    read = {os.path.realpath(source.path) for source in find_files(inputs, encoding, lambda message: None)}
    written: set[str] = set()
    for each in filter(None, outputs):
        real = os.path.realpath(each)
        if real in read:
            raise InputError(f"{each} is read: choose another name for what is written")
        if real in written:
            raise InputError(f"{each} would be written twice: choose another name for one of them")
        written.add(real)


def _known(where: str, paths: Iterable[Path], say: Callable[[str], None]) -> list[str]:
    """Those of a kind that is read, sorted; the others are said."""
    every = sorted(map(str, paths))
    known = [path for path in every if kind(path)]
    others = [path for path in every if not kind(path)]
    if known and others:
        named = ", ".join(others[:NAMED]) + ", ..." * (len(others) > NAMED)
        say(f"{where}: {len(others)} of {len(every)} files are not read, being of another kind ({named})")
    return known


def _weight(given: str) -> tuple[str, float]:
    name, at, weight = given.rpartition("@")
    if not at or os.path.exists(given):
        return given, 1.0
    try:
        value = float(weight)
    except ValueError:
        return given, 1.0
    if not 0 < value < 1e6:
        raise InputError(f"the weight in {given} must be a positive number")
    return name, value


def _check_file(path: str) -> None:
    if not os.path.isfile(path):
        raise InputError(f"there is no file {path}")
    if not kind(path):
        raise InputError(f"{path} is none of {KINDS}")
    if not os.access(path, os.R_OK):
        raise InputError(f"cannot read {path}: no permission")


def is_compressed(path: str) -> bool:
    """By the ending of its name."""
    return path.lower().endswith(COMPRESSED)


def kind(path: str) -> str | None:
    """The suffix that says what a file holds, e.g. `.jsonl` for x.jsonl.gz or X.JSONL."""
    stem = os.path.splitext(path)[0].lower() if is_compressed(path) else path.lower()
    found = next((suffix for suffix in SUFFIXES if stem.endswith(suffix)), None)
    return None if found == ".parquet" and is_compressed(path) else found  # parquet compresses by itself
