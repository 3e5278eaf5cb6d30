"""Documents that were there before: word for word, or nearly so (MinHash; Broder 1997)."""

import hashlib
import re
from functools import lru_cache
from typing import Any, NamedTuple
from unicodedata import category

PERMUTATIONS = 128
SHINGLE = 5


@lru_cache(maxsize=1)
def _beside_letters() -> re.Pattern[str]:
    """Spaces, punctuation and symbols. Marks are part of a letter: vowels of Hindi and Thai are."""
    marks = "".join(c for c in map(chr, [*range(0x300, 0x1F000), *range(0xE0100, 0xE01F0)]) if category(c)[0] == "M")
    return re.compile(f"[^\\w{marks}]+|_+")


def skeleton(text: str) -> str:
    """What is left of a text when spaces, punctuation and case do not count."""
    return _beside_letters().sub("", text).casefold()


class Prints(NamedTuple):
    """What is compared of a text. exact: `fingerprint`; near: `sketch`."""

    exact: int = 0
    near: Any = None


def fingerprint(text: str) -> int:
    """64 bits of a text without its spaces, punctuation and case."""
    bare = skeleton(text) or text
    return int.from_bytes(hashlib.blake2b(bare.encode(), digest_size=8).digest(), "little")


def _datasketch() -> Any:
    try:
        import datasketch
    except ImportError:
        raise ValueError("near duplicates need the package datasketch: pip install datasketch") from None
    return datasketch


def sketch(text: str) -> Any:
    """A MinHash of the sets of SHINGLE characters in a row. Raises ValueError without the package datasketch."""
    bare = skeleton(text) or text
    shingles = {bare[i : i + SHINGLE].encode() for i in range(max(len(bare) - SHINGLE + 1, 1))}
    made = _datasketch().MinHash(num_perm=PERMUTATIONS, seed=1)
    made.update_batch(sorted(shingles))
    return made


class ExactDuplicates:
    """`seen(text)`: whether the same text came before, spaces, punctuation and case aside. 8 bytes a document are kept.

    Two different documents of 100 million are taken for the same with a probability of 0.03 %.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def seen(self, text: str) -> bool:
        """Whether the same text came before; from now on it did."""
        return self.has(fingerprint(text))

    def has(self, key: int) -> bool:
        """`seen` of the text with this fingerprint."""
        if key in self._seen:
            return True
        self._seen.add(key)
        return False


class NearDuplicates:
    """`seen(text)`: whether a text of a Jaccard similarity of about `threshold` came before.

    Similarity is of what `sketch` takes. Found through datasketch's locality-sensitive
    hash; it keeps about 2 kB a document in memory. Raises ValueError without the package datasketch.
    """

    def __init__(self, threshold: float = 0.8) -> None:
        self._index: Any = _datasketch().MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS)
        self._threshold = threshold
        self._kept: dict[int, Any] = {}

    def seen(self, text: str) -> bool:
        """Whether a text much like it came before; from now on it did."""
        return self.has(sketch(text))

    def has(self, sketched: Any) -> bool:
        """`seen` of the text with this sketch."""
        # The hash proposes; the sketches decide.
        for key in self._index.query(sketched):
            if self._kept[key].jaccard(sketched) >= self._threshold:
                return True
        key = len(self._kept)
        self._kept[key] = sketched
        self._index.insert(key, sketched)
        return False
