"""Damage of corpora that have the right size: blocks whose checksum is wrong, and holes in the tokens."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..storage import to_path
from .corpus_paths import TRIPLE_PARTS, has_loss_mask, is_triple
from .fingerprints import made_with, made_with_pair
from .indexed_dataset import LOSS_SUFFIX, IndexedDataset

Sidecar = Mapping[str, Any]  # the content of a sidecar
READ_AT_ONCE = 1 << 22  # bytes
MIN_RUN_LENGTH = 1024  # tokens; a shorter run of one id is no hole
TOKENS_AT_ONCE = 1 << 20
ADVICE = "copy the file again or rebuild the corpus with tools/preprocess_data.py"


def evenly_spaced(count: int, max_count: int) -> list[int]:
    """Return at most `max_count` of the numbers 0 to `count` - 1, evenly spaced, with the first and the last."""
    return sorted({int(number) for number in np.linspace(0, count - 1, min(max_count, count))})


def sidecar_sums(prefix: str, sidecar: Sidecar | None) -> dict[str, Any] | None:
    """Return the checksums of the pair `prefix` in its sidecar, or None if there are none.

    The sidecar names the pairs as they were when it was written. A corpus that was renamed keeps its pairs' endings.
    """
    sums_by_name = (sidecar or {}).get("sha256")
    if not isinstance(sums_by_name, dict):
        return None
    name = Path(prefix).name
    # A sidecar of web and web_loss has the common name web and the endings "" and "_loss". If the corpus was renamed to
    # news, its pairs are news and news_loss. Both names end with "", but news_loss also with "_loss", so the longest
    # ending counts: the checksums of news_loss are those of web + _loss.
    old_name = os.path.commonprefix(list(sums_by_name))
    longest_ending = ""
    for listed_name in sums_by_name:
        ending = listed_name.removeprefix(old_name)
        if name.endswith(ending) and len(ending) > len(longest_ending):
            longest_ending = ending
    if name not in sums_by_name:  # the corpus was renamed
        name = old_name + longest_ending
    sums = sums_by_name.get(name)
    return sums if isinstance(sums, dict) else None


class Block(NamedTuple):
    """Bytes `begin` to `end` - 1 of a file, and the SHA-256 that they must have."""

    path: Path
    begin: int
    end: int
    expected: str

    def read_pieces(self) -> Iterator[bytes]:
        """Yield the content in pieces of at most `READ_AT_ONCE` bytes."""
        remaining = self.end - self.begin
        with self.path.open("rb") as file:
            file.seek(self.begin)
            # A piece is empty if the file has become shorter; the checksum then differs.
            while remaining and (piece := file.read(min(remaining, READ_AT_ONCE))):
                yield piece
                remaining -= len(piece)

    def find_error(self, pieces: Iterator[bytes] | None = None) -> str | None:
        """Return a message if the content has another SHA-256. pieces: the content; read from the file if None."""
        digest = hashlib.sha256()
        for piece in pieces or self.read_pieces():
            digest.update(piece)
        if digest.hexdigest() == self.expected:
            return None
        return f"{self.path} is damaged in bytes {self.begin} to {self.end}: SHA-256 differs from the sidecar"


def blocks_of(path: Path, sums: Sidecar) -> list[Block]:
    """Return the blocks of a .bin or .idx that have a checksum. sums: the entry of `sidecar_sums`."""
    size = path.stat().st_size
    block_size = sums.get("block", 1 << 26)  # 64 MiB, unless the sidecar has another size
    starts = range(0, size, block_size)
    expected = sums[path.suffix.removeprefix(".")]
    blocks = []
    # If the file has the wrong size, the numbers of blocks and of checksums differ; `find_damage` reports that.
    for start, checksum in zip(starts, expected, strict=False):
        end = min(start + block_size, size)
        blocks.append(Block(path, start, end, checksum))
    return blocks


def find_damage(prefix: str, sums: Sidecar, max_blocks: int | None = None) -> Iterator[str]:
    """Yield a message for each block of a pair whose SHA-256 is not that of the sidecar.

    sums: the entry of `sidecar_sums`. max_blocks: number of blocks of each file to read, evenly spaced; all if None.
    """
    block_size = sums.get("block", 1 << 26)
    for ending in ("bin", "idx"):
        path = to_path(f"{prefix}.{ending}")
        expected_count = len(sums[ending])
        count = -(-path.stat().st_size // block_size)  # rounded up, as the last block may be shorter
        if count != expected_count:
            yield f"{path} has {count} blocks of {block_size >> 20} MiB, but the sidecar lists {expected_count}"
        blocks = blocks_of(path, sums)
        for number in evenly_spaced(len(blocks), max_blocks or len(blocks)):
            if problem := blocks[number].find_error():
                yield problem


def find_holes(indexed: IndexedDataset, eod: int | None, max_blocks: int | None = None) -> Iterator[str]:
    """Yield a message for each run of one id that is longer than any document, as an interrupted copy leaves it.

    eod: id that many empty documents may repeat. max_blocks: number of blocks to read; all if None.
    """
    count = -(-indexed.num_tokens // TOKENS_AT_ONCE)  # rounded up
    runs = list[list[int]]()  # [begin, end, id] of each run, with positions in the whole corpus
    for number in evenly_spaced(count, max_blocks or count):
        first_token = number * TOKENS_AT_ONCE
        tokens = indexed.tokens[first_token : first_token + TOKENS_AT_ONCE]
        for begin_in_block, end_in_block, token in _find_runs(np.asarray(tokens)):
            begin = first_token + begin_in_block
            end = first_token + end_in_block
            # A run continues from the block before if the last run has the same id and ends where this one begins.
            if runs and runs[-1][1:] == [begin, token]:
                runs[-1][1] = end
            else:
                runs.append([begin, end, token])
    shortest = min(MIN_RUN_LENGTH, indexed.num_tokens)  # a small corpus may be one run
    for begin, end, token in runs:
        if token != eod and end - begin >= shortest:
            yield from _describe_hole(indexed, begin, end, token)


def _describe_hole(indexed: IndexedDataset, begin: int, end: int, token: int) -> Iterator[str]:
    """Yield a message if the run of `token` from `begin` to `end` is longer than any document and spans few of them."""
    sizes = indexed.document_sizes(range(indexed.num_documents))
    longest = np.max(sizes, initial=0)
    ends = indexed.document_ends()
    # Document `first` contains the first token of the run, document `last` the last one.
    first = ends.searchsorted(begin, "right")
    last = ends.searchsorted(end - 1, "right")
    # Documents that hold a single token may repeat one id, which is no hole. So the documents of a hole must have more
    # than two tokens on average.
    if end - begin > longest and 2 * (last - first) < end - begin:
        size = indexed.dtype.itemsize
        yield (
            f"{indexed.prefix}.bin has a hole: bytes {begin * size} to {end * size} (documents {first} to {last}) "
            f"hold the id {token} only, and no document is longer than {longest} tokens; copy the file again"
        )


def _find_runs(tokens: Any) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end, id) of each run of one id with at least `MIN_RUN_LENGTH` tokens, and of those at both ends.

    A run at an end may continue in the next block.
    """
    # Tokens 7 7 7 4 have one change, at 3, so the bounds are 0 3 4 and the lengths 3 1.
    changes = np.flatnonzero(tokens[1:] != tokens[:-1]) + 1
    bounds = np.concatenate([[0], changes, [len(tokens)]])
    lengths = np.diff(bounds)
    is_candidate = lengths >= MIN_RUN_LENGTH
    is_candidate[[0, -1]] = True
    for index in np.flatnonzero(is_candidate).tolist():
        begin = bounds[index]
        yield begin, bounds[index + 1], int(tokens[begin])


def pairs_of(prefix: str) -> list[str]:
    """Return the prefixes of the pairs of files that a corpus has: tokens, loss mask and parts."""
    names = [prefix]
    if has_loss_mask(prefix):
        names.append(prefix + LOSS_SUFFIX)
    if is_triple(prefix):
        names += [f"{prefix}_{part}" for part in TRIPLE_PARTS]
    return [name for name in names if to_path(f"{name}.idx").is_file()]


def find_problems(prefix: str, max_blocks: int | None = None) -> Iterator[str]:
    """Yield a message for each damaged block and each hole of a corpus, which may have several pairs.

    max_blocks: number of blocks of each file to read, evenly spaced; all if None.
    """
    pairs = pairs_of(prefix)
    for pair in pairs:
        sums = sidecar_sums(pair, made_with_pair(prefix, pair))
        if sums:
            for problem in find_damage(pair, sums, max_blocks):
                yield f"{problem}; {ADVICE}"
    if prefix in pairs:
        eod = (made_with(prefix) or {}).get("eod")
        # A block of tokens has 2 or 4 MiB, one of the sidecar 64 MiB, so read more of them. None, for all, stays None.
        yield from find_holes(IndexedDataset(prefix), eod, max_blocks and 16 * max_blocks)
