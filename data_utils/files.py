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
REPORT = ".report.json"  # what tools/clean_corpus.py adds to the name of its output
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

    An input is a file, a folder (searched through with the folders that it links to, but for what is hidden) or a glob
    pattern of files and folders, and may end with `@WEIGHT`. say: is told which files of folders and patterns are of no
    kind that is read or reports of tools/clean_corpus.py, and which links lead to what is read already.
    Raises InputError for what does not exist, cannot be read, or is of an unknown kind.
    """
    is_utf8(encoding)
    files: list[Source] = []
    for given in inputs:
        name, weight = _weight(given)
        path = Path(name)
        if path.is_dir():
            found = _known(name, _there(_all_files(name, [path], say)), say)
            if not found:
                raise InputError(f"the folder {name} holds no file of {KINDS}")
        elif glob.has_magic(name) and not path.exists():
            _check_folders_of(name)
            found = _known(name, _there(_all_files(name, map(Path, glob.glob(name, recursive=True)), say)), say)
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


def _all_files(where: str, given: Iterable[Path], say: Callable[[str], None]) -> list[Path]:
    """`given`, but for folders what is in them and in the folders that they link to; each once, as links may go in a circle."""
    search, found = _Search(), list[Path]()
    for path in sorted(given, key=lambda path: (len(path.parts), path)):
        found += search.files(path)
    if search.again:
        say(f"{where}: what lies behind links and is read under another name is not read again ({_some(search.again)})")
    return found


class _Search:
    """What was found: paths by their real ones. again: other ways to the same."""

    def __init__(self) -> None:
        self._found: dict[str, Path] = {}
        self.again: list[Path] = []

    def files(self, path: Path) -> Iterator[Path]:
        """The path of a file, those of the files in a folder. Raises InputError for a folder that cannot be read."""
        # A link to a file is a file of its own, as a copy would be. A pattern may name what stands behind more links than the system follows.
        place = os.path.join(os.path.realpath(path.parent), path.name)
        if not os.path.isdir(place):
            if self._is_new(place, path):
                yield path
        elif self._is_new(os.path.realpath(path), path):
            for folder, folders, names in os.walk(path, onerror=_refuse, followlinks=True):
                _check_folder(folder)
                here = os.path.realpath(folder)
                folders[:] = [
                    name
                    for name in sorted(folders)
                    if not name.startswith(".")
                    and self._is_new(os.path.realpath(os.path.join(folder, name)), Path(folder, name))
                ]
                for name in sorted(names):
                    if not name.startswith(".") and self._is_new(os.path.join(here, name), Path(folder, name)):
                        yield Path(folder, name)

    def _is_new(self, real: str, path: Path) -> bool:
        first = self._found.setdefault(real, path)
        if first is not path and first != path:
            self.again.append(path)
        return first is path


def _refuse(error: OSError) -> None:
    raise InputError(f"cannot read the folder {error.filename}: {error.strerror}; leave it out, or make it readable")


def _check_folder(path: str) -> None:
    if not os.access(path, os.R_OK | os.X_OK):
        raise InputError(f"cannot read the folder {path}: no permission; leave it out, or make it readable")


def _check_folders_of(pattern: str) -> None:
    """Raise InputError for a folder that a pattern looks into and cannot read: glob would pass over it."""
    while (above := os.path.dirname(pattern)) != pattern:
        for folder in glob.glob(above or os.curdir, recursive=True):
            if os.path.isdir(folder):
                _check_folder(folder)
        if not glob.has_magic(above):
            break
        pattern = above


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
    """Those of a kind that is read, sorted; the others are said, and the reports of what is read."""
    every = sorted(map(str, paths))
    reports = [path for path in every if _is_report(path)]
    if reports:
        say(f"{where}: {len(reports)} reports of tools/clean_corpus.py are not read ({_some(reports)})")
        every = [path for path in every if not _is_report(path)]
    known = [path for path in every if kind(path)]
    others = [path for path in every if not kind(path)]
    if known and others:
        say(f"{where}: {len(others)} of {len(every)} files are not read, being of another kind ({_some(others)})")
    return known


def _is_report(path: str) -> bool:
    """By its name, which goes on after that of a corpus: x.report.json alone may be a text."""
    return path.endswith(REPORT) and kind(path.removesuffix(REPORT)) is not None


def _some(paths: Sequence[Path | str]) -> str:
    return ", ".join(map(str, paths[:NAMED])) + ", ..." * (len(paths) > NAMED)


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
