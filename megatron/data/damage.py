"""Damage of corpora that have the right size: blocks whose checksum is wrong, and holes in the tokens."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..storage import to_path
from .cpm_masking import PARTS
from .indexed_dataset import LOSS, IndexedDataset

About = Mapping[str, Any]  # the content of a sidecar
READ_AT_ONCE = 1 << 22  # bytes
SUSPICIOUS = 1024  # tokens; a shorter run of one id is no hole
TOKENS_AT_ONCE = 1 << 20
ADVICE = "copy the file again or rebuild the corpus with tools/preprocess_data.py"


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` of the numbers 0 to `count` - 1, evenly spaced, with the first and the last."""
    if not count:
        return []
    return sorted({int(at) for at in np.linspace(0, count - 1, min(most, count))})


def sums_of(prefix: str, about: About | None) -> dict[str, Any] | None:
    """Return the checksums of the pair `prefix` in its sidecar `about`, or None if there are none.

    The sidecar names the pairs as they were when it was written. A corpus that was renamed keeps its pairs' endings.
    """
    known = (about or {}).get("sha256")
    if not isinstance(known, dict) or not known:
        return None
    name = Path(prefix).name
    common = os.path.commonprefix(list(known))
    endings = [each.removeprefix(common) for each in known]
    ending = max((each for each in endings if name.endswith(each)), key=len, default="")
    found = known.get(name, known.get(common + ending))
    return found if isinstance(found, dict) else None


class Block(NamedTuple):
    """Bytes `begin` to `end` - 1 of a file, and the SHA-256 that they must have."""

    path: Path
    begin: int
    end: int
    expected: str

    def pieces(self) -> Iterator[bytes]:
        """Yield the content in pieces of at most `READ_AT_ONCE` bytes."""
        left = self.end - self.begin
        with self.path.open("rb") as file:
            file.seek(self.begin)
            while left and (piece := file.read(min(left, READ_AT_ONCE))):
                yield piece
                left -= len(piece)

    def damage(self, pieces: Iterator[bytes] | None = None) -> str | None:
        """Return a message if the content has another SHA-256. pieces: the content; read from the file if None."""
        digest = hashlib.sha256()
        for piece in pieces or self.pieces():
            digest.update(piece)
        if digest.hexdigest() == self.expected:
            return None
        return f"{self.path} is damaged in bytes {self.begin} to {self.end}: SHA-256 differs from the sidecar"


def blocks_of(path: Path, sums: About) -> list[Block]:
    """Return the blocks of a .bin or .idx that have a checksum. sums: the entry of `sums_of`."""
    size = path.stat().st_size
    block = sums.get("block", 1 << 26)
    starts = range(0, size, block)
    ends = [min(start + block, size) for start in starts]
    expected = sums[path.suffix.removeprefix(".")]
    return [Block(path, *each) for each in zip(starts, ends, expected, strict=False)]


def find_damage(prefix: str, sums: About, most: int | None = None) -> Iterator[str]:
    """Yield a message for each block of a pair whose SHA-256 is not that of the sidecar.

    sums: the entry of `sums_of`. most: number of blocks of each file to read, evenly spaced; all if None.
    """
    block = sums.get("block", 1 << 26)
    for ending in ("bin", "idx"):
        path = to_path(f"{prefix}.{ending}")
        listed = len(sums[ending])
        count = -(-path.stat().st_size // block)
        if count != listed:
            yield f"{path} has {count} blocks of {block >> 20} MiB, but the sidecar lists {listed}"
        blocks = blocks_of(path, sums)
        for number in spread(len(blocks), most or len(blocks)):
            if problem := blocks[number].damage():
                yield problem


def find_holes(indexed: IndexedDataset, eod: int | None, most: int | None = None) -> Iterator[str]:
    """Yield a message for each run of one id that is longer than any document, as an interrupted copy leaves it.

    eod: id that many empty documents may repeat. most: number of blocks to read; all if None.
    """
    count = -(-indexed.num_tokens // TOKENS_AT_ONCE)
    found: list[list[int]] = []  # begin, end and id of each run
    for number in spread(count, most or count):
        at = number * TOKENS_AT_ONCE
        for begin, end, token in _runs(np.asarray(indexed.tokens[at : at + TOKENS_AT_ONCE])):
            if found and found[-1][1:] == [at + begin, token]:
                found[-1][1] = at + end
            else:
                found.append([at + begin, at + end, token])
    for begin, end, token in found:
        if token != eod:
            yield from _hole(indexed, begin, end, token)


def _hole(indexed: IndexedDataset, begin: int, end: int, token: int) -> Iterator[str]:
    """Yield a message if the run of `token` from `begin` to `end` is longer than any document and spans few of them."""
    longest = _longest_document(indexed)
    ends = indexed.document_ends()
    first = int(ends.searchsorted(begin, "right"))
    last = int(ends.searchsorted(end - 1, "right"))
    if end - begin > longest and 2 * (last - first) < end - begin:
        size = indexed.dtype.itemsize
        yield (
            f"{indexed.prefix}.bin has a hole: bytes {begin * size} to {end * size} (documents {first} to {last}) "
            f"hold the id {token} only, and no document is longer than {longest} tokens; copy the file again"
        )


def _runs(tokens: Any) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end, id) of each run of one id that is suspicious, or touches an end of `tokens`."""
    changes = np.flatnonzero(tokens[1:] != tokens[:-1]) + 1
    bounds = np.concatenate([[0], changes, [len(tokens)]])
    lengths = np.diff(bounds)
    for at in np.flatnonzero(lengths >= min(SUSPICIOUS, len(tokens))).tolist():
        yield int(bounds[at]), int(bounds[at + 1]), int(tokens[bounds[at]])


def _longest_document(indexed: IndexedDataset) -> int:
    sizes = indexed.document_sizes(range(indexed.num_documents))
    return int(np.max(sizes)) if len(sizes) else 0


def pairs_of(prefix: str) -> list[str]:
    """Return the prefixes of the pairs of files that a corpus has: tokens, loss mask and parts."""
    names = [prefix, prefix + LOSS, *(f"{prefix}_{part}" for part in PARTS)]
    return [name for name in names if to_path(f"{name}.idx").is_file()]


def problems_of(prefix: str, about: About | None, most: int | None = None) -> Iterator[str]:
    """Yield a message for each damaged block and each hole of a corpus, which may have several pairs.

    about: content of its sidecar. most: number of blocks of each file to read, evenly spaced; all if None.
    """
    pairs = pairs_of(prefix)
    for pair in pairs:
        if sums := sums_of(pair, about):
            for problem in find_damage(pair, sums, most):
                yield f"{problem}; {ADVICE}"
    if prefix in pairs:
        eod = about.get("eod") if about else None
        # A block of tokens is smaller than one of the sidecar.
        yield from find_holes(IndexedDataset(prefix), eod, most and 16 * most)
