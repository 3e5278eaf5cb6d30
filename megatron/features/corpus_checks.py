"""Comparison of all blocks of the corpora with the checksums of their sidecars, while the run trains."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..config import Config
from ..data.damage import ADVICE, Block, blocks_of, pairs_of, sidecar_sums
from ..data.fingerprints import made_with_pair
from ..data.indexed_dataset import DatasetError
from ..ranks.agreement import raise_on_all_ranks
from ..ranks.objects import gather_objects
from ..ranks.rank_0 import own_rank, print_rank_0
from ..storage import RemotePath, to_path
from ..training.data_ranks import reads_data
from ..training.feature import Feature, Plan
from ..training.inputs import blocks_at_start, corpora_of_run
from ..training.run_folder import save_dir_of
from ..training.run_state import Run
from .corpus_changes import CorpusFile, FileWatch, Identity, identity_of

REST_FACTOR = 4.0  # pause after a block, as a multiple of the time that it took
RETRY_SECONDS = 10.0  # seconds between two looks for blocks that were downloaded meanwhile


class CorpusChecks(Feature):
    """Feature that ends the run if a block of a corpus has another SHA-256 than its sidecar lists, or is changed.

    Before the run begins, rank 0 has compared a few blocks of each file, so that the start is fast. The ranks that read
    data compare the others in a thread. Ranks that see the same file share its blocks; a node with a copy of its own
    checks this copy. Of objects in storage, a node compares the blocks that are in its cache.
    """

    def prepare(self, plan: Plan) -> None:
        # Before the data sets are opened, so that a change of their files until the first save is noticed.
        self._files = _files_of(plan.config) if reads_data() else []
        self._watch = FileWatch(self._files)

    def start(self, run: Run) -> None:
        self._config = run.config
        self._watch.begin(save_dir_of(run.config, run.run_dir), run.state.iteration)
        self._checkers: list[Checker] = []
        self._compare(self._files)

    def before_step(self, iteration: int) -> None:
        for checker in self._checkers:
            if checker.problem:
                raise DatasetError(checker.problem)

    def before_save(self, iteration: int) -> None:
        """Compare files that were changed since the last save: a few blocks now, and all in a thread."""
        changed = self._watch.find_changed()
        max_blocks = blocks_at_start(self._config)
        with raise_on_all_ranks():
            # A problem that a thread has found must end the run before this checkpoint is written.
            self.before_step(iteration)
            for file in changed:
                self._watch.check_content(file, max_blocks)
        # The files that changed on any rank. A dict keeps each name once, and in the order of ranks.
        names: dict[str, None] = {}
        for paths in gather_objects([str(file.path) for file in changed]):
            names |= dict.fromkeys(paths)
        if names:
            print_rank_0(
                f"note: {', '.join(names)} changed while the run trains on it, but the {max_blocks} blocks of each "
                "file that were compared have the checksums of the sidecar; the others are compared while the run "
                "trains"
            )
            self._compare(changed)
        elif not any(checker.is_alive() for checker in self._checkers):  # a thread may still find a changed block
            self._watch.last_clean = iteration

    def close(self, error: BaseException | None) -> None:
        for checker in self._checkers:
            checker.end()

    def _compare(self, files: Sequence[CorpusFile]) -> None:
        """Start a thread that compares this rank's share of the blocks with the checksums of the sidecar. Collective.

        Rank 0 has already compared the first blocks of each local file.
        """
        identities = {str(file.path): identity_of(file) for file in files}
        shares = _files_of_rank(files, gather_objects(identities), blocks_at_start(self._config))
        if shares:
            checker = Checker(shares)
            checker.start()
            self._checkers.append(checker)


class Checker(threading.Thread):
    """Thread that compares blocks, and rests between them, so that training has the processors and disks.

    problem: message about the first damaged block; None as long as there is none.
    """

    def __init__(self, files: Sequence[CorpusFile]) -> None:
        super().__init__(name="corpus-checks", daemon=True)
        self._files = files
        self._stop_event = threading.Event()
        self.problem: str | None = None

    def end(self) -> None:
        """Let the thread end after the block that it reads now."""
        self._stop_event.set()

    def run(self) -> None:
        """Compare all blocks once; those that are not in the cache yet, later."""
        unchecked = list(self._files)
        while unchecked and not self._should_stop():
            # Each file keeps the blocks that its cache lacks so far; a file without such blocks is done.
            compared = map(self._compare_available, unchecked)
            unchecked = [file for file in compared if file.blocks]
            if unchecked:
                self._stop_event.wait(RETRY_SECONDS)

    def _should_stop(self) -> bool:
        return self._stop_event.is_set() or self.problem is not None

    def _compare_available(self, file: CorpusFile) -> CorpusFile:
        """Compare the blocks that are there, and return the file with the others."""
        missing = []
        try:
            for block in file.blocks:
                if self._should_stop():
                    break
                if not self._compare(file, block):
                    missing.append(block)
        except OSError as error:  # the run itself can still read a file that it has mapped
            print(f"note: {file.path} is no longer compared with its checksums: {error}", file=sys.stderr)
            missing = []
        return file._replace(blocks=missing)

    def _compare(self, file: CorpusFile, block: Block) -> bool:
        """Compare a block; return False if the cache lacks a part of it.

        Any process may delete a file of the cache to make room, and begin it again, while this thread reads it. So a
        block counts as damaged only if its files are the same afterwards.
        """
        begin = time.monotonic()
        pieces = block.read_pieces()  # read lazily, from the file itself
        cached = None
        if file.cache:  # an object in storage, of which this machine has some blocks
            from ..data.remote_tokens import cached_pieces

            cached = cached_pieces(file.cache, block.begin, block.end)
            if cached is None:
                return False
            pieces = _read_pieces(cached)
        damage = block.find_error(pieces)
        if damage and file.cache and cached_pieces(file.cache, block.begin, block.end) != cached:
            return False
        if damage:  # a sentence: "FILE is damaged in bytes A to B: SHA-256 differs from the sidecar"
            self.problem = f"{damage}; {file.advice}"
        # Rest for a multiple of the time that the block took, but end the rest at once if the run ends.
        self._stop_event.wait(REST_FACTOR * (time.monotonic() - begin))
        return True


def _files_of(config: Config) -> list[CorpusFile]:
    """Return the files to watch for changes, and whose blocks are to be compared if there are checksums.

    They are the local files of the corpora, and the data in storage that have checksums. An index in storage is left
    out, because the run reads a copy, which was downloaded as a whole.
    """
    files = []
    for prefix in corpora_of_run(config):
        for pair in pairs_of(prefix):
            checksums = sidecar_sums(pair, made_with_pair(prefix, pair))
            data = to_path(f"{pair}.bin")
            index = to_path(f"{pair}.idx")
            if checksums or not isinstance(data, RemotePath):
                files.append(_corpus_file(data, checksums))
            if not isinstance(index, RemotePath):
                files.append(_corpus_file(index, checksums))
    return files


def _corpus_file(path: Path, checksums: dict[str, Any] | None) -> CorpusFile:
    cache = None
    advice = ADVICE
    if isinstance(path, RemotePath):
        from ..data.remote_tokens import version_folder

        cache = version_folder(path, path.stamp())
        advice = f"delete its copy in {cache} and start again; if the object itself is damaged, {ADVICE}"
    blocks = blocks_of(path, checksums) if checksums else []
    return CorpusFile(path, cache, blocks, advice)


def _files_of_rank(
    files: Sequence[CorpusFile], identities: Sequence[dict[str, Identity]], blocks_before: int
) -> list[CorpusFile]:
    """Return the files with the blocks that this rank compares.

    identities: of each rank, the identities of its files by path. For three ranks that see the same file, the second
    gets blocks 1, 4, 7, ... blocks_before: number of blocks of each local file that rank 0 has compared; a file that
    has no more of them is left out.
    """
    rank = own_rank()
    shares = []
    for file in files:
        path = str(file.path)
        identity = identities[rank][path]
        # Ranks that see this very file share its blocks; a node with a copy of its own checks this copy alone.
        sharers = [each for each, seen in enumerate(identities) if seen.get(path) == identity]
        # Before the run began, rank 0 has compared up to `blocks_before` blocks of each local file that it sees.
        compared_by_rank_0 = 0
        if 0 in sharers and not file.cache:
            compared_by_rank_0 = blocks_before
        if len(file.blocks) > compared_by_rank_0:
            # Of three sharers, the second compares the blocks 1, 4, 7, ...
            rank_blocks = file.blocks[sharers.index(rank) :: len(sharers)]
            shares.append(file._replace(blocks=rank_blocks))
    return shares


def _read_pieces(pieces: Sequence[tuple[Path, int | None, int, int]]) -> Iterator[bytes]:
    """Yield the bytes of pieces of the cache, see `cached_pieces`, without those whose file was deleted."""
    for path, _, offset, length in pieces:
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            file.seek(offset)
            yield file.read(length)
