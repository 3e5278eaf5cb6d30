"""Selection of input files (which files are read, and in which order), and creation of output files."""

import glob
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from megatron.atomic import atomic_file

from .streams import COMPRESSED, InputError, detect_encoding, is_utf8

SUFFIXES = (".jsonl", ".ndjson", ".json", ".txt", ".csv", ".parquet")
SUPPORTED = f"{', '.join(SUFFIXES)} (plain, {', '.join(COMPRESSED)})"
AUTO = "auto"  # --encoding that finds the encoding of each file
MAX_NAMED = 3  # number of skipped files that a message lists by name

# How the files of the data tools begin: journals and sidecars of preprocess_data.py, reports and dropped documents of
# clean_corpus.py, and tokenizers of train_tokenizer.py
_TOOL_OUTPUT = re.compile(
    rb'{("job": "[0-9a-f]{64}", "state"|\n  "tokenizer": |\n  "read": \d+,\n  "read_chars"|"reason": "[^"]*", "text": )'
    rb'|{\n  "version": "1.0",\n  "truncation"|{"<\|endoftext\|>": 0, |#version: 0\.2\n|<unk>\n<eod>\n<0x00>\n'
)


class Source(NamedTuple):
    """Input file.

    weight: how many times each document is used; 0.5 selects half of the documents at random.
    number: index of the file among all inputs.
    """

    path: str
    weight: float = 1.0
    number: int = 0
    encoding: str = "utf-8"


def _to_stderr(message: str) -> None:
    print(message, file=sys.stderr)


def find_files(
    inputs: Sequence[str], encoding: str = "utf-8", notify: Callable[[str], None] = _to_stderr
) -> list[Source]:
    """Return the text files of all inputs in the order of the inputs; the files of one input are sorted by name.

    inputs: files, folders or glob patterns, each optionally followed by `@WEIGHT`. Folders are searched recursively;
    the search follows links and skips hidden entries.
    encoding: encoding of the text, or `auto` to judge each file by its content.
    notify: called with a message about skipped files. Within a folder or pattern, files of other types, files that the
    data tools wrote (reports, sidecars, journals, tokenizers) and links to a file that is already found are skipped.
    Raises InputError for an input that does not exist, cannot be read or is of an unsupported type, and for a file that
    two inputs give.
    """
    if encoding != AUTO:
        is_utf8(encoding)  # raises InputError for an unknown encoding
    files: list[Source] = []
    seen: set[str] = set()
    for text in inputs:
        name, weight = _split_weight(text)
        path = Path(name)
        if path.is_dir():
            paths = _supported_files(name, [path], notify)
        elif glob.has_magic(name) and not path.exists():  # a file's own name may contain *, ? or [
            _check_folders_of(name)
            paths = _supported_files(name, map(Path, glob.glob(name, recursive=True)), notify)
        else:
            paths = [name]
        for path_found in paths:
            _check_file(path_found)
            real = os.path.realpath(path_found)
            if real in seen:  # another input has given the file; its copies within one input are skipped above
                raise InputError(f"{path_found} is given twice; give it once, as {path_found}@2 to read it twice")
            seen.add(real)
            file_encoding = encoding
            if encoding == AUTO:  # Parquet files are binary and have UTF-8 strings
                file_encoding = "utf-8" if format_suffix(path_found) == ".parquet" else detect_encoding(path_found)
            files.append(Source(path_found, weight, number=len(files), encoding=file_encoding))
    return files


def missing_inputs(inputs: Sequence[str]) -> list[str]:
    """Return the inputs that do not exist, except glob patterns and `-`; an input may end with `@WEIGHT`."""
    names = [_split_weight(text)[0] for text in inputs]
    return [name for name in names if name != "-" and not glob.has_magic(name) and not os.path.exists(name)]


def _walk_files(name: str, paths: Iterable[Path], notify: Callable[[str], None]) -> list[Path]:
    """Return the files in `paths` and below its folders, following links.

    Each file is returned once, even if links to folders lead to it several times or form cycles.
    """
    search = _Search()
    files = list[Path]()
    # Of several paths of a file, the first one counts, so the paths with the fewest folders come first.
    for path in sorted(paths, key=lambda path: (len(path.parts), path)):
        files += search.files(path)
    if search.duplicates:
        notify(f"{name}: skipped links to files that are read under another name ({_abbreviate(search.duplicates)})")
    return files


class _Search:
    """Recursive search that yields each file once.

    duplicates: paths that were not yielded, because they lead through links to a file already found.
    """

    def __init__(self) -> None:
        self._found: dict[str, Path] = {}
        self.duplicates: list[Path] = []

    def files(self, path: Path) -> Iterator[Path]:
        """Yield `path` if it is a file, else the files below it. Raises InputError for an unreadable folder."""
        # The path that a pattern matches may contain more links than the system can follow, so use the resolved path.
        real = os.path.realpath(path)
        if not self._is_new(real, path):
            return
        if not os.path.isdir(real):
            yield path
            return
        for folder, folders, names in os.walk(path, onerror=_raise_unreadable, followlinks=True):
            _check_folder(folder)
            folders[:] = self._new_of(folder, folders)  # os.walk descends into the folders that remain
            for name in self._new_of(folder, names):
                yield Path(folder, name)

    def _new_of(self, folder: str, names: Iterable[str]) -> Iterator[str]:
        """Yield the names in a folder that are neither hidden nor found before, sorted."""
        for name in sorted(names):
            real = os.path.realpath(os.path.join(folder, name))
            if not name.startswith(".") and self._is_new(real, Path(folder, name)):
                yield name

    def _is_new(self, real: str, path: Path) -> bool:
        """Return whether a file is found for the first time; note another path of a known file as a duplicate."""
        # setdefault() stores and returns `path` itself for a new file. For a known one, it returns the stored path.
        first = self._found.setdefault(real, path)
        if first != path:  # a pattern may give the same path twice, which is no duplicate
            self.duplicates.append(path)
        return first is path


def _raise_unreadable(error: OSError) -> None:
    raise InputError(f"cannot read the folder {error.filename}: {error.strerror}; make it readable or exclude it")


def _check_folder(path: str) -> None:
    if not os.access(path, os.R_OK | os.X_OK):
        raise InputError(f"cannot read the folder {path}: no permission; make it readable or exclude it")


def _check_folders_of(pattern: str) -> None:
    """Raise InputError if a folder that a glob pattern matches is unreadable, because glob would skip it silently."""
    # For data/*/x*.jsonl, check the folders that data/* matches, then data, the first parent without a pattern. Only ""
    # and "/" are their own dirname().
    while (parent := os.path.dirname(pattern)) != pattern:
        for folder in glob.glob(parent or os.curdir, recursive=True):
            if os.path.isdir(folder):
                _check_folder(folder)
        if not glob.has_magic(parent):
            break
        pattern = parent


def _existing_files(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the paths that are files. Raises InputError for a broken link, such as to an unmounted disk."""
    for path in paths:
        if path.is_symlink() and not path.exists():
            raise InputError(f"{path} is a broken link to {os.readlink(path)}")
        if path.is_file():
            yield path


def check_outputs(inputs: Sequence[str], outputs: Sequence[str | None], encoding: str) -> None:
    """Raise InputError if an output would overwrite an input or another output."""
    read = {os.path.realpath(source.path) for source in find_files(inputs, encoding, notify=lambda message: None)}
    written: set[str] = set()
    for each in filter(None, outputs):
        real = os.path.realpath(each)
        if real in read:
            raise InputError(f"{each} is both input and output; choose another output")
        if real in written:
            raise InputError(f"{each} is the name of two outputs; choose another name for one of them")
        written.add(real)


def _supported_files(name: str, paths: Iterable[Path], notify: Callable[[str], None]) -> list[str]:
    """Return the files of supported types in `paths` and below its folders, sorted; `notify` of skipped files.

    Raises InputError if there are none.
    """
    files = _walk_files(name, paths, notify)
    found = sorted(map(str, _existing_files(files)))
    outputs = list(filter(_is_tool_output, found))
    candidates = sorted({*found} - {*outputs})  # all files but the outputs of the data tools
    if outputs:
        notify(f"{name}: skipped {len(outputs)} files that the data tools wrote ({_abbreviate(outputs)})")
    supported = list(filter(format_suffix, candidates))
    others = [path for path in candidates if not format_suffix(path)]
    if not supported:
        raise InputError(
            f"{name} gives no file to read: of {len(found)} files, {len(outputs)} are outputs of the data tools, read "
            f"only if named themselves, and {len(others)} are not of a supported type; supported are {SUPPORTED}"
        )
    if others:
        notify(f"{name}: skipped {len(others)} of {len(candidates)} files of unsupported types ({_abbreviate(others)})")
    return supported


def _is_tool_output(path: str) -> bool:
    """Return True for a file of which _TOOL_OUTPUT knows the beginning."""
    if not path.endswith((".json", ".jsonl", ".txt")):
        return False
    with open(path, "rb") as file:
        return _TOOL_OUTPUT.match(file.read(99)) is not None


def _abbreviate(paths: Sequence[Path | str]) -> str:
    """Return the first MAX_NAMED paths in words."""
    # The dots follow only if there are more paths, as False counts as 0.
    return ", ".join(map(str, paths[:MAX_NAMED])) + ", ..." * (len(paths) > MAX_NAMED)


def _split_weight(text: str) -> tuple[str, float]:
    """Split an input `NAME@WEIGHT` into its name and weight; the weight is 1 if none is given."""
    name, separator, weight = text.rpartition("@")
    # An existing file may have an @ in its name.
    if not separator or os.path.exists(text):
        return text, 1.0
    try:
        value = float(weight)
    except ValueError:
        return text, 1.0
    if not 0 < value < 1e6:
        raise InputError(f"the weight in {text} must be a positive number below 1000000")
    return name, value


def _check_file(path: str) -> None:
    if not os.path.isfile(path):
        raise InputError(f"there is no file {path}")
    if not format_suffix(path):
        raise InputError(f"{path} is not of a supported type; supported are {SUPPORTED}")
    if not os.access(path, os.R_OK):
        raise InputError(f"cannot read {path}: no permission")


def new_file(path: str | Path) -> AbstractContextManager[Path]:
    """Return `atomic_file(path)`; create the folder of the file if it is missing."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    return atomic_file(path)


def is_compressed(path: str) -> bool:
    """Return True if the file name has a compression suffix."""
    return path.lower().endswith(COMPRESSED)


@lru_cache
def format_suffix(path: str) -> str | None:
    """Return the suffix that determines a file's format, e.g. `.jsonl` for x.jsonl.gz or X.JSONL, or None."""
    name = path.lower()
    if is_compressed(path):
        name = os.path.splitext(name)[0]
    suffix = next(filter(name.endswith, SUFFIXES), None)  # the one of SUFFIXES with which the name ends
    if suffix == ".parquet" and is_compressed(path):  # Parquet files are compressed inside
        return None
    return suffix
