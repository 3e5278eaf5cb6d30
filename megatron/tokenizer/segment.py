"""Chinese word segmentation with jieba (accurate mode, HMM), or with rjieba, which is several times as fast.

rjieba nearly always agrees with jieba on runs of Han characters but treats the text between the runs differently
(rjieba keeps `package.json` whole). So rjieba segments only the runs of Han characters, and the other text is split by
jieba's two regular expressions. The results could still differ in two cases, both next to letters and digits. In these
cases jieba itself segments the whole block of Han characters, letters and digits:

- a dictionary word that contains a letter (T恤, C++);
- a run of single characters on the best path. jieba segments such a run again with its HMM, unless the run is a
  dictionary word. Adjacent letters become part of the run, so that it is not a dictionary word. rjieba does not
  see the letters, and its output does not show where such a run begins.

Differences remain where two segmentations have nearly equal scores, whose last bits decide. Such differences cannot be
ruled out, so a tokenizer with rjieba has another fingerprint than one with jieba.
"""

import importlib.util
import re
import tempfile
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import numpy as np

from .base import TokenizerError

SEGMENTERS = ("jieba", "rjieba")
_HAN = re.compile("([\u4e00-\u9fd5]+)")
_ASCII = re.compile(r"([a-zA-Z0-9+#&._%\-]+)")  # dictionary words consist of these and Han characters
_NUMBER = re.compile(r"([a-zA-Z0-9]+(?:\.\d+)?%?)")
_SPACE = re.compile(r"(\r\n|\s)")
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+#&._%-")
SEPARATOR = "\ud800"  # word separator; half of a surrogate pair, so it occurs in no text
_FIRST_SINGLES = re.compile(f"^(?:[^{SEPARATOR}]{SEPARATOR})+[^{SEPARATOR}](?![^{SEPARATOR}])")
_LAST_SINGLES = re.compile(f"(?<![^{SEPARATOR}])(?:[^{SEPARATOR}]{SEPARATOR})+[^{SEPARATOR}]$")

Cut = Callable[[str], str]


def segmenter(kind: str = "jieba") -> Cut:
    """Return the function that inserts SEPARATOR between the words of a text.

    kind: `jieba` or `rjieba`. Raises TokenizerError if the package is missing.
    """
    if kind not in SEGMENTERS:
        raise TokenizerError(f"there is no segmenter {kind!r}; choose one of {', '.join(SEGMENTERS)}")
    for name in dict.fromkeys(("jieba", kind)):
        if not importlib.util.find_spec(name):
            raise TokenizerError(f"this tokenizer needs the package {name} to segment words: pip install {name}")
    made: list[Cut] = []

    def cut(text: str) -> str:
        if not made:  # the dictionary takes a second to load, and many tokenizers never segment a text
            jieba = _load_jieba()
            made.append(
                _RjiebaSegmenter(jieba).cut if kind == "rjieba" else lambda text: SEPARATOR.join(jieba.cut(text))
            )
        return made[0](text)

    return cut


@lru_cache(maxsize=1)
def _load_jieba() -> Any:
    import jieba

    # jieba caches its parsed dictionary under a well-known name in the shared temporary folder and trusts
    # whatever it finds there. A private folder prevents that, at the cost of a second to parse the dictionary.
    jieba.setLogLevel("WARNING")
    with tempfile.TemporaryDirectory() as folder:
        jieba.dt.tmp_dir = folder
        jieba.initialize()
    return jieba


@lru_cache(maxsize=1 << 17)
def _cut_between(text: str) -> str:
    """Split a text that contains no Han characters and no dictionary words into words, as jieba does."""
    words: list[str] = []
    for i, part in enumerate(_ASCII.split(text)):
        if i % 2:
            words += [word for word in _NUMBER.split(part) if word]
        else:
            for j, piece in enumerate(_SPACE.split(part)):
                words += [piece] if j % 2 else list(piece)
    return SEPARATOR.join(words)


def _ties(hmm: Any, margin: float = 1e-6) -> set[str]:
    """Return pairs of Han characters whose HMM scores as one word and as two words differ by less than `margin`."""
    trans, start, never = hmm.trans_P, hmm.start_P, hmm.MIN_FLOAT
    single, begin, end = (hmm.emit_P[state] for state in "SBE")
    first = {c: single[c] - begin[c] for c in single.keys() & begin.keys()}
    second = {c: single[c] - end[c] for c in single.keys() & end.keys()}
    chars = np.array(sorted(second, key=second.__getitem__))
    values = np.array([second[c] for c in chars])
    found: set[str] = set()
    before = [start["S"] - start["B"], *(trans[state]["S"] - trans[state]["B"] for state in "ES")]
    after = [0.0, *(trans["S"].get(state, never) - trans["E"].get(state, never) for state in "BS")]
    for gap in (b + a + trans["S"]["S"] - trans["B"]["E"] for b in before for a in after):
        for char, value in first.items():
            low, high = values.searchsorted([-gap - value - margin, -gap - value + margin])
            found.update(char + other for other in chars[low:high])
    return found


class _RjiebaSegmenter:
    """Segmenter that uses rjieba on runs of Han characters, and jieba where rjieba could differ from it."""

    def __init__(self, jieba: Any) -> None:
        import rjieba

        self._jieba, self._cut_han = jieba, rjieba.cut
        self._cut_doubtful = lru_cache(maxsize=1 << 14)(lambda block: SEPARATOR.join(jieba.cut(block)))
        self._frequency = jieba.dt.FREQ
        mixed = [word for word, count in self._frequency.items() if count and len(word) > 1 and _ASCII.search(word)]
        doubtful = sorted({*mixed, *_ties(jieba.finalseg)}, key=len, reverse=True)
        self._doubtful = re.compile("|".join(map(re.escape, doubtful)))

    def cut(self, text: str) -> str:
        parts: list[str] = []
        self._cut_around(text, (found.span() for found in self._doubtful.finditer(text)), parts)
        return SEPARATOR.join(parts)

    def _cut_around(self, text: str, doubtful: Iterable[tuple[int, int]], into: list[str]) -> None:
        """Segment blocks around the `doubtful` spans with jieba, as rjieba could differ, and other text with rjieba."""
        at = 0
        for start, end in doubtful:
            if start < at:
                continue
            while start > at and self._looked_up(text[start - 1]):
                start -= 1
            while end < len(text) and self._looked_up(text[end]):
                end += 1
            self._cut_plain(text[at:start], into)
            into.append(self._cut_doubtful(text[start:end]))
            at = end
        self._cut_plain(text[at:], into)

    @staticmethod
    def _looked_up(char: str) -> bool:
        return char in _LETTERS or _HAN.match(char) is not None

    def _cut_plain(self, text: str, into: list[str]) -> None:
        """Segment text that contains no dictionary word on which rjieba could differ from jieba."""
        parts = _HAN.split(text)  # other text (maybe empty) at even indices, Han runs at odd ones
        if len(parts) == 1:
            into += [_cut_between(text)] if text else []
            return
        runs = SEPARATOR.join(self._cut_han("\n".join(parts[1::2]))).split(f"{SEPARATOR}\n{SEPARATOR}")
        doubtful: list[tuple[int, int]] = []
        at = 0
        for run, han, before, after in zip(runs, parts[1::2], parts[::2], parts[2::2], strict=False):
            at += len(before)
            if self._could_differ(run, before, after):
                doubtful.append((at, at + len(han)))
            at += len(han)
        if doubtful:
            self._cut_around(text, doubtful, into)
            return
        for between, run in zip(parts[::2], [*runs, ""], strict=True):
            into += [_cut_between(between)] if between else []
            into += [run] if run else []

    def _could_differ(self, run: str, before: str, after: str) -> bool:
        """Return whether a run of single Han characters next to letters is a dictionary word."""
        first = _FIRST_SINGLES.search(run) if run[1:2] == SEPARATOR and before and before[-1] in _LETTERS else None
        last = _LAST_SINGLES.search(run) if run[-2:-1] == SEPARATOR and after and after[0] in _LETTERS else None
        return any(found and self._frequency.get(found[0].replace(SEPARATOR, "")) for found in (first, last))
