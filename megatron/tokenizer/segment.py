"""Chinese word segmentation with jieba (accurate mode, HMM), or with rjieba, which is several times as fast.

rjieba nearly always agrees with jieba on sequences of Han characters. It treats other text differently: for example, it
keeps `package.json` whole. So rjieba segments only sequences of Han characters. The regular expressions of jieba split
the other text. Near letters and digits, the results could still differ in two cases. In these cases jieba segments the
whole block of Han characters, letters and digits:

- A dictionary word contains a letter (T恤, C++).
- The dictionary splits several adjacent Han characters into single characters. jieba segments such a sequence again
  with its HMM, unless the sequence is a dictionary word. To jieba, letters next to the characters belong to the
  sequence, which is then not a dictionary word. rjieba gets no letters, so to rjieba the sequence may be a dictionary
  word. The output of rjieba does not show where such a sequence begins.

Differences are still possible where two segmentations have nearly equal scores. So a tokenizer with rjieba has another
fingerprint than the same tokenizer with jieba.
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
_ASCII = re.compile(r"([a-zA-Z0-9+#&._%\-]+)")  # characters of dictionary words besides Han characters
_NUMBER = re.compile(r"([a-zA-Z0-9]+(?:\.\d+)?%?)")
_SPACE = re.compile(r"(\r\n|\s)")
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+#&._%-")
SEPARATOR = "\ud800"  # word separator; an unpaired surrogate, which cannot occur in valid text
_FIRST_SINGLES = re.compile(f"^(?:[^{SEPARATOR}]{SEPARATOR})+[^{SEPARATOR}](?![^{SEPARATOR}])")
_LAST_SINGLES = re.compile(f"(?<![^{SEPARATOR}])(?:[^{SEPARATOR}]{SEPARATOR})+[^{SEPARATOR}]$")

Cut = Callable[[str], str]


def segmenter(kind: str = "jieba") -> Cut:
    """Return a function that takes a text and returns it with SEPARATOR between the words.

    kind: `jieba` or `rjieba`. Raises TokenizerError if the package is not installed.
    """
    if kind not in SEGMENTERS:
        raise TokenizerError(f"there is no segmenter {kind!r}; choose one of {', '.join(SEGMENTERS)}")
    for name in dict.fromkeys(("jieba", kind)):
        if not importlib.util.find_spec(name):
            raise TokenizerError(f"this tokenizer needs the package {name} to split words: pip install {name}")
    made: list[Cut] = []

    def cut(text: str) -> str:
        if not made:  # jieba is loaded on first use: it takes a second, and many processes never segment a text
            jieba = _load_jieba()
            made.append(
                _RjiebaSegmenter(jieba).cut if kind == "rjieba" else lambda text: SEPARATOR.join(jieba.cut(text))
            )
        return made[0](text)

    return cut


@lru_cache(maxsize=1)
def _load_jieba() -> Any:
    import jieba

    # By default, jieba caches its parsed dictionary under a well-known name in the shared temporary folder. It would
    # also load a file that another user put there. With a private folder, jieba parses the dictionary (1 s) instead.
    jieba.setLogLevel("WARNING")
    with tempfile.TemporaryDirectory() as folder:
        jieba.dt.tmp_dir = folder
        jieba.initialize()
    return jieba


@lru_cache(maxsize=1 << 17)
def _cut_between(text: str) -> str:
    """Split text between Han characters into words with jieba's regular expressions; return it with SEPARATORs.

    The text must contain no Han characters and no dictionary words.
    """
    words: list[str] = []
    for i, part in enumerate(_ASCII.split(text)):
        if i % 2:
            words += [word for word in _NUMBER.split(part) if word]
        else:
            for j, piece in enumerate(_SPACE.split(part)):
                words += [piece] if j % 2 else list(piece)
    return SEPARATOR.join(words)


def _ties(hmm: Any, margin: float = 1e-6) -> set[str]:
    """Return the two-character strings that the HMM scores almost equally as one word and as two words.

    margin: the maximum difference of the scores.
    """
    trans = hmm.trans_P
    start = hmm.start_P
    never = hmm.MIN_FLOAT
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
    """Segmenter that uses rjieba for sequences of Han characters, and jieba where the results could differ."""

    def __init__(self, jieba: Any) -> None:
        import rjieba

        self._jieba = jieba
        self._cut_han = rjieba.cut
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
        """Segment the blocks around `doubtful` spans with jieba and the other text with rjieba; append to `into`.

        doubtful: (start, end) of text for which rjieba could differ from jieba.
        """
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
        """Segment text that matches no pattern in `_doubtful`; append its words to `into`."""
        parts = _HAN.split(text)  # even indices: other text, maybe empty; odd indices: sequences of Han characters
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
        """Return True if jieba could segment a sequence of Han characters differently because of letters next to it.

        run: the sequence as rjieba segments it, with SEPARATOR between the words. before, after: text before and after
        the sequence. A difference is possible if `run` begins or ends with single-character words next to a letter,
        and if these characters together are a dictionary word.
        """
        first = _FIRST_SINGLES.search(run) if run[1:2] == SEPARATOR and before and before[-1] in _LETTERS else None
        last = _LAST_SINGLES.search(run) if run[-2:-1] == SEPARATOR and after and after[0] in _LETTERS else None
        return any(found and self._frequency.get(found[0].replace(SEPARATOR, "")) for found in (first, last))
