"""Detection of duplicate documents: exact, or near duplicates by MinHash (Broder 1997)."""

import hashlib
import re
from functools import lru_cache
from typing import Any, NamedTuple
from unicodedata import category

PERMUTATIONS = 128
SHINGLE = 5


@lru_cache(maxsize=1)
def _beside_letters() -> re.Pattern[str]:
    """Return a pattern that matches everything except letters and digits.

    Combining marks count as letters because Hindi and Thai write vowels as combining marks.
    """
    marks = "".join(c for c in map(chr, [*range(0x300, 0x1F000), *range(0xE0100, 0xE01F0)]) if category(c)[0] == "M")
    return re.compile(f"[^\\w{marks}]+|_+")


def skeleton(text: str) -> str:
    """Return the text without spaces and punctuation, and with letters that differ only in case made equal."""
    return _beside_letters().sub("", text).casefold()


class Prints(NamedTuple):
    """Fingerprints of a document. exact: hash from `fingerprint`. near: MinHash from `sketch`."""

    exact: int = 0
    near: Any = None


def fingerprint(text: str) -> int:
    """Return a 64-bit hash of a text without its spaces, punctuation and case."""
    bare = skeleton(text) or text
    return int.from_bytes(hashlib.blake2b(bare.encode(), digest_size=8).digest(), "little")


def _datasketch() -> Any:
    try:
        import datasketch
    except ImportError:
        raise ValueError("--near-duplicates needs the package datasketch: pip install datasketch") from None
    return datasketch


def sketch(text: str) -> Any:
    """Return the MinHash of all substrings of SHINGLE characters of a text.

    Raises ValueError if the package datasketch is not installed.
    """
    bare = skeleton(text) or text
    shingles = {bare[i : i + SHINGLE].encode() for i in range(max(len(bare) - SHINGLE + 1, 1))}
    made = _datasketch().MinHash(num_perm=PERMUTATIONS, seed=1)
    made.update_batch(sorted(shingles))
    return made


class ExactDuplicates:
    """Set of texts that ignores spaces, punctuation and case; takes about 100 bytes per document.

    Texts are compared by 64-bit hashes. Among 100 million different documents, the probability that any two have the
    same hash is 0.03 %.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def seen(self, text: str) -> bool:
        """Return True if the set contains an equal text; add the text otherwise."""
        return self.has(fingerprint(text))

    def has(self, key: int) -> bool:
        """Return True if the set contains a text with the fingerprint `key`; add the fingerprint otherwise."""
        if key in self._seen:
            return True
        self._seen.add(key)
        return False


class NearDuplicates:
    """Set of texts that detects near duplicates: texts with a Jaccard similarity of about `threshold` or more.

    The similarity of two texts is that of their sets of substrings of SHINGLE characters, estimated by MinHash. The
    package datasketch finds the candidates by locality-sensitive hashing. The set takes about 2 kB per document.
    Raises ValueError if datasketch is not installed.
    """

    def __init__(self, threshold: float = 0.8) -> None:
        self._index: Any = _datasketch().MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS)
        self._threshold = threshold
        self._kept: dict[int, Any] = {}

    def seen(self, text: str) -> bool:
        """Return True if the set contains a similar text; add the text otherwise."""
        return self.has(sketch(text))

    def has(self, sketched: Any) -> bool:
        """Return True if the set contains a text with a similar MinHash; add the MinHash otherwise."""
        # Locality-sensitive hashing only finds candidates, so the MinHash of each candidate is compared, too.
        for key in self._index.query(sketched):
            if self._kept[key].jaccard(sketched) >= self._threshold:
                return True
        key = len(self._kept)
        self._kept[key] = sketched
        self._index.insert(key, sketched)
        return False
