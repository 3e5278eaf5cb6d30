"""Local files of corpora that are changed while a run trains on them, found before each save."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from ..checkpointing.lookup import numbered_checkpoints
from ..data.damage import ADVICE, Block, evenly_spaced
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
    status = (file.cache or file.path).stat()
    # The cache changes while blocks are downloaded, so its time is no sign of another version.
    return Identity(status.st_ino, status.st_size, 0 if file.cache else status.st_mtime_ns)


class FileWatch:
    """The local files of corpora that this rank reads, as they were when they were last looked at.

    `begin` comes before the other methods. last_clean: iteration of the last checkpoint at whose save no file had
    changed.
    """

    def __init__(self, files: Sequence[CorpusFile]) -> None:
        self._files = [file for file in files if not file.cache]
        self._known = {file.path: identity_of(file) for file in self._files}

    def begin(self, folder: Path, iteration: int) -> None:
        """Begin to watch. folder: the run's checkpoints. iteration: the one at which the files were opened."""
        self._folder = folder
        self.last_clean = iteration

    def find_changed(self) -> list[CorpusFile]:
        """Return the files that were changed since the last call, with advice that names the change.

        A file that was deleted is left out: the run has mapped it and trains on.
        """
        changed_files = []
        for file in self._files:
            try:
                new = identity_of(file)
            except OSError:
                continue
            old = self._known[file.path]
            if new != old:
                self._known[file.path] = new
                changed_files.append(file._replace(advice=self._advice(old, new)))
        return changed_files

    def check_content(self, file: CorpusFile, max_blocks: int) -> None:
        """Raise DatasetError if a changed file has another size or content. max_blocks: number of blocks to compare."""
        blocks = file.blocks
        if not blocks:
            raise DatasetError(f"{file.path} has no checksums that show whether its content changed; {file.advice}")
        if self._known[file.path].size != blocks[-1].end:
            raise DatasetError(f"{file.path} has another size; {file.advice}")
        for number in evenly_spaced(len(blocks), max_blocks):
            damage = blocks[number].find_error()
            if damage:
                raise DatasetError(f"{damage}; {file.advice}")

    def _advice(self, old: Identity, new: Identity) -> str:
        """Return how a file has changed and what to do, in words."""
        time = datetime.fromtimestamp(new.modified / 1e9).isoformat(" ", "seconds")
        change = f"modified at {time}"
        if new.size != old.size:
            change = f"changed at {time} from {old.size} to {new.size} bytes"
        elif new.inode != old.inode:
            change = "replaced by another file"
        return f"the file was {change} while the run trained on it: restore it, {self._recovery_advice()}"

    def _recovery_advice(self) -> str:
        """Return how to continue without the changed text, as the end of a sentence."""
        # Checkpoints after `last_clean` may contain steps on the changed file.
        clean = [path for number, path in numbered_checkpoints(self._folder).items() if number <= self.last_clean]
        if not clean:
            return "and start again, as no checkpoint is older than the change"
        checkpoint = clean[-1].name  # the newest, as checkpoints are in ascending order
        return (
            f"write {checkpoint}, the last checkpoint that is older than the change, into {self._folder / 'latest'}, "
            "and run the same command"
        )
