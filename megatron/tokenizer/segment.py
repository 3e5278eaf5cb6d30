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
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from typing import Any

import numpy as np

from ..packages import pip_install
from .base import TokenizerError, any_name_pattern

SEGMENTERS = ("jieba", "rjieba")
_HAN = re.compile("([\u4e00-\u9fd5]+)")
_ASCII = re.compile(r"([a-zA-Z0-9+#&._%\-]+)")  # characters of dictionary words besides Han characters
_NUMBER = re.compile(r"([a-zA-Z0-9]+(?:\.\d+)?%?)")
_SPACE = re.compile(r"(\r\n|\s)")
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+#&._%-")
SEPARATOR = "\ud800"  # word separator; an unpaired surrogate, which cannot occur in valid text
# Two or more words of one character at the beginning of a sequence of words, and at its end.
_FIRST_SINGLES = re.compile(f"^(?:[^{SEPARATOR}]{SEPARATOR})+[^{SEPARATOR}](?![^{SEPARATOR}])")
_LAST_SINGLES = re.compile(f"(?<![^{SEPARATOR}])(?:[^{SEPARATOR}]{SEPARATOR})+[^{SEPARATOR}]$")

Cut = Callable[[str], str]


def segmenter(kind: str = "jieba") -> Cut:
    """Return a function that takes a text and returns it with SEPARATOR between the words.

    kind: `jieba` or `rjieba`. Raises TokenizerError if the package is not installed.
    """
    if kind not in SEGMENTERS:
        raise TokenizerError(f"there is no segmenter {kind!r}; choose one of {', '.join(SEGMENTERS)}")
    packages = SEGMENTERS if kind == "rjieba" else ("jieba",)  # with rjieba, jieba still segments doubtful parts
    for name in packages:
        if not importlib.util.find_spec(name):
            raise TokenizerError(f"this tokenizer needs the package {name} to split words: {pip_install(name)}")
    # jieba is loaded on first use: it takes a second, and many processes never segment a text.
    return lambda text: _load_cut(kind)(text)


@cache
def _load_cut(kind: str) -> Cut:
    """Return the function that cuts a text into words joined by SEPARATOR."""
    import jieba

    # By default, jieba caches its parsed dictionary under a well-known name in the shared temporary folder. It would
    # also load a file that another user put there. With a private folder, jieba parses the dictionary (1 s) instead.
    jieba.setLogLevel("WARNING")
    with tempfile.TemporaryDirectory() as folder:
        jieba.dt.tmp_dir = folder
        jieba.initialize()
    if kind == "rjieba":
        return _RjiebaSegmenter(jieba).cut
    return lambda text: SEPARATOR.join(jieba.cut(text))


@lru_cache(maxsize=1 << 17)
def _cut_between(text: str) -> str:
    """Split text between Han characters into words with jieba's regular expressions; return it with SEPARATORs.

    The text must contain no Han characters and no dictionary words.
    """
    words: list[str] = []
    for i, part in enumerate(_ASCII.split(text)):
        if i % 2:  # split() puts the matches of the pattern at odd indices
            # "v1.5+x" becomes "v1.5", "+", "x". split() also returns empty parts, which are no words.
            words += filter(None, _NUMBER.split(part))
        else:
            # White space is a word, "\r\n" a single one. Of other text, such as punctuation, each character is a word.
            for j, piece in enumerate(_SPACE.split(part)):
                words += [piece] if j % 2 else list(piece)
    return SEPARATOR.join(words)


def _find_ties(hmm: Any) -> set[str]:
    """Return the two-character strings that the HMM scores almost equally as one word and as two words."""
    margin = 1e-6  # the maximum difference of the scores
    # HMM states: S a word of one character, B the begin and E the end of a longer word.
    begin = hmm.emit_P["B"]
    end = hmm.emit_P["E"]
    # The HMM compares the string ab as two words with ab as one word. The difference of the scores is the sum
    # gap + first[a] + second[b], with a gap of `_transition_gaps`. If the sum is almost 0, ab is a tie.
    first = {}
    second = {}
    for char, score in hmm.emit_P["S"].items():
        if char in begin:
            first[char] = score - begin[char]
        if char in end:
            second[char] = score - end[char]
    chars = sorted(second, key=second.__getitem__)
    values = np.array([second[char] for char in chars])  # in ascending order, for a binary search
    ties: set[str] = set()
    for gap in _transition_gaps(hmm):
        for char, value in first.items():
            # Find each `other` for which the sum gap + value + second[other] lies between -margin and margin.
            center = -gap - value
            low, high = values.searchsorted([center - margin, center + margin])
            ties.update(char + other for other in chars[low:high])
    return ties


def _transition_gaps(hmm: Any) -> Iterator[float]:
    """Yield how much better the transitions of two words are than those of one, for all neighbours of the two.

    As two words, two characters have the states S S; as one word, B E. With t(x, y), the log probability of the
    transition from state x to state y, and the states p before and q after the two characters, a gap is
    [t(p, S) + t(S, S) + t(S, q)] - [t(p, B) + t(B, E) + t(E, q)].
    """
    trans = hmm.trans_P
    from_single = trans["S"]
    from_end = trans["E"]
    # t(p, S) - t(p, B): p is the begin of the text, or a character that ends a word (E) or is one (S).
    before = [hmm.start_P["S"] - hmm.start_P["B"]]
    for from_state in (from_end, from_single):
        before.append(from_state["S"] - from_state["B"])
    # t(S, q) - t(E, q): q is the end of the text, without a transition, or a character that begins a word (B) or is
    # one (S).
    after = [0.0]
    for state_after in ("B", "S"):
        after.append(from_single[state_after] - from_end[state_after])
    for gap_before in before:
        for gap_after in after:
            yield gap_before + gap_after + from_single["S"] - trans["B"]["E"]


class _RjiebaSegmenter:
    """Segmenter that uses rjieba for sequences of Han characters, and jieba where the results could differ."""

    def __init__(self, jieba: Any) -> None:
        import rjieba

        self._cut_han = rjieba.cut
        self._cut_doubtful = lru_cache(maxsize=1 << 14)(lambda block: SEPARATOR.join(jieba.cut(block)))
        self._frequency = jieba.dt.FREQ
        doubtful = _find_ties(jieba.finalseg)
        # Dictionary words with a letter, such as C++. jieba counts the prefixes of words as words of frequency 0.
        for word, count in self._frequency.items():
            if count and len(word) > 1 and _ASCII.search(word):
                doubtful.add(word)
        self._doubtful = any_name_pattern(doubtful)

    def cut(self, text: str) -> str:
        doubtful = (match.span() for match in self._doubtful.finditer(text))
        return SEPARATOR.join(self._cut_around(text, doubtful))

    def _cut_around(self, text: str, doubtful: Iterable[tuple[int, int]]) -> Iterator[str]:
        """Segment the blocks around `doubtful` spans with jieba and the other text with rjieba; yield the results.

        doubtful: (start, end) of text for which rjieba could differ from jieba.
        """
        position = 0
        for start, end in doubtful:
            if start < position:
                continue  # the block around the previous span contains this one
            while start > position and self._is_word_char(text[start - 1]):
                start -= 1
            while end < len(text) and self._is_word_char(text[end]):
                end += 1
            yield from self._cut_plain(text[position:start])
            yield self._cut_doubtful(text[start:end])
            position = end
        yield from self._cut_plain(text[position:])

    @staticmethod
    def _is_word_char(char: str) -> bool:
        return char in _LETTERS or _HAN.match(char) is not None

    def _cut_plain(self, text: str) -> Iterator[str]:
        """Segment text without a match of `_doubtful`; yield groups of its words, each with SEPARATOR between words."""
        # For "ok你好": ["ok", "你好", ""], Han characters at odd indices and other text, maybe empty, at even indices.
        parts = _HAN.split(text)
        if len(parts) == 1:  # no Han characters
            if text:
                yield _cut_between(text)
            return
        between = parts[::2]  # between[i] comes before blocks[i]; the last one comes after the last block
        blocks = parts[1::2]
        # One call segments all blocks, one per line. It returns each line break as a word.
        words = self._cut_han("\n".join(blocks))
        cut_blocks = SEPARATOR.join(words).split(f"{SEPARATOR}\n{SEPARATOR}")
        doubtful = []
        position = 0  # in `text`
        for i, block in enumerate(blocks):
            position += len(between[i])
            end = position + len(block)
            if self._could_differ(cut_blocks[i], between[i], between[i + 1]):
                doubtful.append((position, end))
            position = end
        if doubtful:
            yield from self._cut_around(text, doubtful)
            return
        # No block follows the last text, so an empty one takes its place.
        for between_text, cut_block in zip(between, [*cut_blocks, ""], strict=True):
            if between_text:
                yield _cut_between(between_text)
            if cut_block:
                yield cut_block

    def _could_differ(self, cut_block: str, before: str, after: str) -> bool:
        """Return True if jieba could segment a sequence of Han characters differently because of letters next to it.

        cut_block: the sequence as rjieba segments it, with SEPARATOR between the words. before, after: text before and
        after the sequence. A difference is possible if `cut_block` begins or ends with single-character words next to a
        letter, and if these characters together are a dictionary word.
        """
        first = None
        last = None
        # Written with "|" as SEPARATOR, "你|好|世界" has a separator after one character, so its first word is a single
        # character, and _FIRST_SINGLES matches "你|好". Likewise for the last word. Without text before or after the
        # sequence, before[-1:] or after[:1] is "", which is no letter.
        if cut_block[1:2] == SEPARATOR and before[-1:] in _LETTERS:
            first = _FIRST_SINGLES.search(cut_block)
        if cut_block[-2:-1] == SEPARATOR and after[:1] in _LETTERS:
            last = _LAST_SINGLES.search(cut_block)
        return self._is_word(first) or self._is_word(last)

    def _is_word(self, singles: "re.Match[str] | None") -> bool:
        """Return whether single-character words together are a dictionary word."""
        return singles is not None and bool(self._frequency.get(singles[0].replace(SEPARATOR, "")))
