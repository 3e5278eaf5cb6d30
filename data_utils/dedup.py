"""Comparison of documents: hashes of whole texts for exact duplicates, substrings for near duplicates."""

import hashlib
from unicodedata import category

SHINGLE = 5


class _Letters(dict[int, str]):
    """Table of str.translate that removes all but letters, digits and symbols, and makes letters of both cases equal.

    Symbols such as < and > are the difference between two formulas or lines of code. Combining marks count as letters
    because Hindi and Thai write vowels as combining marks. The table is filled as characters are met: a regular
    expression with all marks is five times as slow.
    """

    def __missing__(self, code: int) -> str:
        char = chr(code)
        is_kept = char.isalnum() or category(char)[0] in "MS"
        self[code] = char.casefold() if is_kept else ""
        return self[code]


_LETTERS = _Letters()


def normalize_text(text: str) -> str:
    """Return the text without spaces and punctuation, and with letters that differ only in case made equal.

    A text that has nothing else is returned as it is.
    """
    return text.translate(_LETTERS) or text


def fingerprint(text: str) -> int:
    """Return a 64-bit hash of a text without its spaces, punctuation and case."""
    normalized = normalize_text(text)
    return int.from_bytes(hashlib.blake2b(normalized.encode(), digest_size=8).digest(), "little")


def shingles(text: str) -> list[str]:
    """Return all substrings of SHINGLE characters of a text without its spaces, punctuation and case."""
    normalized = normalize_text(text)
    return [normalized[i : i + SHINGLE] for i in range(max(len(normalized) - SHINGLE + 1, 1))]


class ExactDuplicates:
    """Set of texts that ignores spaces, punctuation and case; takes about 100 bytes per document.

    Texts are compared by 64-bit hashes. Among 100 million different documents, the probability that any two have the
    same hash is 0.03 %.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def check_and_add(self, key: int) -> bool:
        """Return True if the set contains a text with the fingerprint `key`; add the fingerprint otherwise."""
        if key in self._seen:
            return True
        self._seen.add(key)
        return False
