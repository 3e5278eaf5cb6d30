"""Local files of corpora that are changed while a run trains on them, found before each save."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from ..checkpointing.files import numbered_checkpoints
from ..data.damage import ADVICE, Block, spread
from ..data.indexed_dataset import DatasetError


class CorpusFile(NamedTuple):
    """A .bin or .idx file, and its blocks in order, [] without checksums.

    cache: folder of the blocks of an object on this machine. advice: what to do if a block is damaged.
    """

    path: Path
    cache: Path | None
    blocks: list[Block]
    advice: str = ADVICE


class Identity(NamedTuple):
    """What differs between two copies of a file, and between a file and its changed version."""

    inode: int
    size: int
    modified: int  # ns


def identity_of(file: CorpusFile) -> Identity:
    """Return the identity of a file; of an object, that of its cache, which each node has."""
    about = (file.cache or file.path).stat()
    return Identity(about.st_ino, about.st_size, 0 if file.cache else about.st_mtime_ns)


class Watch:
    """The local files of corpora that this rank reads, as they were when they were last looked at.

    folder: the run's checkpoints. iteration: the one at which the files were opened.
    """

    def __init__(self, files: Sequence[CorpusFile], folder: Path, iteration: int) -> None:
        self._files = [file for file in files if not file.cache]
        self._known = {file.path: identity_of(file) for file in self._files}
        self._folder = folder
        self._unaffected = iteration

    def changed(self) -> list[CorpusFile]:
        """Return the files that were changed since the last call, with advice that names the change.

        A file that was deleted is left out: the run has mapped it and trains on.
        """
        found = []
        for file in self._files:
            try:
                now = identity_of(file)
            except OSError:
                continue
            known = self._known[file.path]
            if now != known:
                self._known[file.path] = now
                found.append(file._replace(advice=self._advice(known, now)))
        return found

    def passed(self, iteration: int) -> None:
        """Note that no file had changed when the checkpoint of this iteration was saved."""
        self._unaffected = iteration

    def refuse(self, file: CorpusFile, most: int) -> None:
        """Raise DatasetError if a changed file has another size or content. most: number of blocks to compare."""
        if not file.blocks:
            raise DatasetError(f"{file.path} has no checksums that show whether its content changed; {file.advice}")
        if self._known[file.path].size != file.blocks[-1].end:
            raise DatasetError(f"{file.path} has another size; {file.advice}")
        for number in spread(len(file.blocks), most):
            if damage := file.blocks[number].damage():
                raise DatasetError(f"{damage}; {file.advice}")

    def _advice(self, known: Identity, now: Identity) -> str:
        when = datetime.fromtimestamp(now.modified / 1e9).isoformat(" ", "seconds")
        what = f"modified at {when}"
        if now.size != known.size:
            what = f"changed at {when} from {known.size} to {now.size} bytes"
        elif now.inode != known.inode:
            what = "replaced by another file"
        return f"the file was {what} while the run trained on it: restore it, {self._way_back()}"

    def _way_back(self) -> str:
        older = [path for number, path in numbered_checkpoints(self._folder).items() if number <= self._unaffected]
        if not older:
            return "and start again, as no checkpoint is older than the change"
        last = older[-1].name
        return (
            f"write {last}, the last checkpoint that is older than the change, into {self._folder / 'latest'}, and run "
            "the same command"
        )
