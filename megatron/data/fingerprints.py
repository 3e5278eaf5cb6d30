"""Fingerprints of corpora, hashes of their content wherever their files are; metadata on how they were made."""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..json_text import read_json
from ..storage import RemotePath, to_path
from .corpus_paths import TRIPLE_PARTS, is_triple
from .indexed_dataset import LOSS_SUFFIX

END_BYTES = 1 << 16  # number of bytes hashed at the start and at the end of a file
BLOCK_COUNT = 256  # number of blocks of a file that are hashed in addition
BLOCK_BYTES = 4096
PARALLEL_REQUESTS = 16  # requests to object storage at the same time


def corpus_fingerprint(prefix: str) -> str:
    """Return a hash that identifies the corpus `prefix`.

    The hash covers the size, start and end of each .bin and .idx file of the corpus and of its loss mask, if any.
    """
    return _hash_ends(_files_of(prefix, prefix + LOSS_SUFFIX))


def content_fingerprint(prefix: str) -> str:
    """Return a hash that identifies the corpus `prefix`, also if only its middle differs from another corpus.

    The hash covers size, start, end and evenly spaced blocks of each file of the corpus and of its loss mask, if any.
    If there is no such file, it covers those of the three pairs of a corpus that was masked during preprocessing.
    """
    masked_pairs = [f"{prefix}_{part}" for part in TRIPLE_PARTS]
    return _hash_content(_files_of(prefix, prefix + LOSS_SUFFIX) or _files_of(*masked_pairs))


def former_content_fingerprint(prefix: str) -> str:
    """Return the `content_fingerprint` of earlier versions, which is the same for all corpora of three pairs."""
    return _hash_content(_files_of(prefix, prefix + LOSS_SUFFIX))


# Checkpoints of earlier versions contain hashes with these fingerprints, the newest first.
FORMER_FINGERPRINTS = (former_content_fingerprint, corpus_fingerprint)


def _hash_ends(files: Sequence[Path]) -> str:
    """Return a hash of the sizes, the beginnings and the ends of files, which is fast for files of any size."""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        with path.open("rb") as file:
            digest.update(f"{path.suffix} {size} ".encode() + file.read(END_BYTES))
            file.seek(max(size - END_BYTES, 0))
            digest.update(file.read(END_BYTES))
    return digest.hexdigest()[:12]


def _hash_content(files: Sequence[Path]) -> str:
    """Return a hash of `_hash_ends` and of evenly spaced blocks of each file."""
    digest = hashlib.sha256(_hash_ends(files).encode())
    for path in files:
        last_start = max(path.stat().st_size - BLOCK_BYTES, 0)
        starts = np.linspace(0, last_start, BLOCK_COUNT).astype(np.int64)
        for block in _read_blocks(path, np.unique(starts).tolist()):
            digest.update(block)
    return digest.hexdigest()[:12]


def _files_of(*pairs: str) -> list[Path]:
    """Return the .bin and .idx files of these pairs that exist."""
    paths = [to_path(pair + ending) for pair in pairs for ending in (".bin", ".idx")]
    return [path for path in paths if path.is_file()]


def _read_blocks(path: Path, starts: Sequence[int]) -> Iterator[bytes]:
    """Yield `BLOCK_BYTES` bytes of a file from each start on."""
    # Each block of a file in object storage is a request, which takes long, so several requests run at the same time.
    if isinstance(path, RemotePath):
        size = path.stat().st_size
        with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
            yield from pool.map(lambda start: path.read_range(start, min(start + BLOCK_BYTES, size)), starts)
        return
    with path.open("rb") as file:
        for start in starts:
            file.seek(start)
            yield file.read(BLOCK_BYTES)


def made_with_pair(prefix: str, pair: str) -> dict[str, Any] | None:
    """Return the metadata that has the checksums of `pair`, one of the pairs of the corpus `prefix`."""
    # Pairs of a masked corpus that were merged one by one have their own files, and the corpus has none.
    return made_with(prefix if to_path(f"{prefix}.json").is_file() else pair)


def made_with(prefix: str) -> dict[str, Any] | None:
    """Return the metadata in `prefix`.json, which tools/preprocess_data.py writes, or None without this file.

    The three pairs of a masked corpus share the file. If they were merged, one by one, each has a file of its own. Then
    this is the content of `prefix`_context.json.
    Raises ValueError if the file cannot be read, is damaged or is something else, such as the text of the corpus.
    """
    path = to_path(f"{prefix}.json")
    if not path.is_file() and is_triple(prefix):
        path = to_path(f"{prefix}_context.json")
    if not path.is_file():
        return None
    try:
        metadata = read_json(path, dict)
        # A text of one line is a JSON object, too. Every sidecar has this entry.
        if "fingerprint" not in metadata:
            raise ValueError("it has no fingerprint")
        return metadata
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read as the sidecar of a corpus ({error}): make it readable, copy it again or rebuild "
            "the corpus with tools/preprocess_data.py, or rename the file if it is something else"
        ) from None
