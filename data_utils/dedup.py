"""Documents that were there before: word for word, or nearly so (MinHash; Broder 1997)."""

import hashlib
import re
from functools import lru_cache
from typing import Any
from unicodedata import category


@lru_cache(maxsize=1)
def _beside_letters() -> re.Pattern[str]:
    """Spaces, punctuation and symbols. Marks are part of a letter: vowels of Hindi and Thai are."""
    marks = "".join(c for c in map(chr, [*range(0x300, 0x1F000), *range(0xE0100, 0xE01F0)]) if category(c)[0] == "M")
    return re.compile(f"[^\\w{marks}]+|_+")


def skeleton(text: str) -> str:
    """What is left of a text when spaces, punctuation and case do not count."""
    return _beside_letters().sub("", text).casefold()


class ExactDuplicates:
    """`seen(text)`: whether the same text came before, spaces, punctuation and case aside. 8 bytes a document are kept.

    Two different documents of 100 million are taken for the same with a probability of 0.03 %.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def seen(self, text: str) -> bool:
        bare = skeleton(text) or text
        key = int.from_bytes(hashlib.blake2b(bare.encode(), digest_size=8).digest(), "little")
        if key in self._seen:
            return True
        self._seen.add(key)
        return False


class NearDuplicates:
    """`seen(text)`: whether a text of a Jaccard similarity of about `threshold` came before.

    Similarity is of the sets of `shingle` characters in a row. Found through datasketch's locality-sensitive
    hash; it keeps about 2 kB a document in memory. Raises ValueError without the package datasketch.
    """

    def __init__(self, threshold: float = 0.8, permutations: int = 128, shingle: int = 5) -> None:
        try:
            from datasketch import MinHash, MinHashLSH
        except ImportError:
            raise ValueError("near duplicates need the package datasketch: pip install datasketch") from None
        self._minhash: Any = MinHash
        self._index: Any = MinHashLSH(threshold=threshold, num_perm=permutations)
        self._threshold, self._permutations, self._shingle = threshold, permutations, shingle
        self._kept: dict[int, Any] = {}

    def seen(self, text: str) -> bool:
        bare = skeleton(text) or text
        shingles = {bare[i : i + self._shingle].encode() for i in range(max(len(bare) - self._shingle + 1, 1))}
        sketch = self._minhash(num_perm=self._permutations, seed=1)
        sketch.update_batch(sorted(shingles))
        # The hash proposes; the sketches decide.
        for key in self._index.query(sketch):
            if self._kept[key].jaccard(sketch) >= self._threshold:
                return True
        key = len(self._kept)
        self._kept[key] = sketch
        self._index.insert(key, sketch)
        return False
