"""Cleaning rules for documents: each rule fixes a document or drops it with a reason.

A rule is a function (text, limits) -> text that raises Drop to drop the document. Rules run in the order of
RULES, and each can be disabled.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from megatron.packages import pip_install

from .quality import (
    broken_characters,
    collapse_lines,
    collapse_phrases,
    encoded_characters,
    html_characters,
    is_misread,
    looks_like_code,
    url_characters,
)


class Drop(Exception):
    """Raised by a rule to drop a document; the argument is the reason."""


@dataclass(frozen=True)
class Limits:
    """Thresholds of the cleaning rules. The fields `max_repeated` to `max_urls` are fractions of all characters."""

    min_chars: int = 16
    max_chars: int = 10_000_000
    max_repeated: float = 0.3
    max_mojibake: float = 0.003
    max_markup: float = 0.1
    max_encoded: float = 0.2
    max_urls: float = 0.5
    script: str = "Han"
    min_script: float = 0.0  # smallest allowed fraction of letters that belong to `script`; 0 disables the rule


Rule = Callable[[str, Limits], str]

# Characters to remove: control characters (except tabs and line breaks), soft hyphens, zero-width spaces, word
# joiners, directional marks and byte order marks.
_INVISIBLE = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\u00ad\u200b\u2060\ufeff\u202a-\u202e\u2066-\u2069]")
_FEEDS = re.compile("[\x0b\x0c]+")
_BREAKS = re.compile("\r\n?|\u2028|\u2029|\x85")


def nfkc(text: str, _: Limits) -> str:
    """Normalise to NFKC, which replaces full-width letters, ligatures and some Chinese punctuation (， becomes ,)."""
    return unicodedata.normalize("NFKC", text)


def control(text: str, _: Limits) -> str:
    """Remove control and invisible characters; replace form feeds by spaces, and every line break by a newline."""
    return _INVISIBLE.sub("", _FEEDS.sub(" ", _BREAKS.sub("\n", text)))


def whitespace(text: str, _: Limits) -> str:
    """Strip white space around the text and at the end of each line; reduce consecutive empty lines to one."""
    lines = "\n".join(line.rstrip() for line in text.split("\n"))
    return re.sub(r"\n{3,}", "\n\n", lines).strip()


def mojibake(text: str, limits: Limits) -> str:
    """Drop text that was decoded with a wrong encoding."""
    if broken_characters(text) > limits.max_mojibake * len(text) or is_misread(text):
        raise Drop("mojibake")
    return text


def _limit_share(measure: Callable[[str], int], limit: str, reason: str, text: str, limits: Limits) -> str:
    """Drop a document if the share of characters that `measure` counts exceeds the field of `limits` named `limit`."""
    if measure(text) > getattr(limits, limit) * len(text):
        raise Drop(reason)
    return text


def repeated(text: str, limits: Limits) -> str:
    """Reduce three or more equal consecutive lines to one; if a line repeats a phrase, keep one copy of the phrase.

    In source code, equal lines are kept. Drop the document if repeated phrases make up too large a part of it, or if
    too many repeated lines remain.
    """
    lines = text.split("\n")
    kept = list(map(collapse_phrases, lines))
    removed = len(text) - len("\n".join(kept))
    if removed > limits.max_repeated * len(text):
        raise Drop("repeated phrases")
    nonblank = list(filter(None, map(str.strip, kept)))
    if len(set(nonblank)) == len(nonblank):  # no line is repeated
        return "\n".join(kept)
    max_share = limits.max_repeated
    if looks_like_code(lines):
        max_share *= 2  # code repeats lines without harm
    else:
        kept = list(collapse_lines(kept))
    # The first copy of a line is no repetition: of 3 copies of a line of 10 characters, 20 characters are repeated.
    counts = Counter(map(str.strip, kept))
    num_chars = 0
    num_repeated = 0
    for line, count in counts.items():
        if len(line) > 1:  # lines of one character, such as a bracket, may be repeated
            num_chars += len(line) * count
            num_repeated += len(line) * (count - 1)
    if num_repeated > max_share * num_chars:
        raise Drop("repeated lines")
    return "\n".join(kept)


def length(text: str, limits: Limits) -> str:
    """Drop a document with fewer than `limits.min_chars` or more than `limits.max_chars` characters."""
    if len(text) < limits.min_chars:
        raise Drop("too short")
    if len(text) > limits.max_chars:
        raise Drop("too long")
    return text


def script(text: str, limits: Limits) -> str:
    """Drop text with too few letters of the script `limits.script`.

    Raises ValueError if the package regex is not installed or the script is unknown.
    """
    if not limits.min_script:
        return text
    try:
        import regex
    except ImportError:
        raise ValueError(f"--min-script needs the package regex: {pip_install('regex')}") from None
    try:
        # The lookahead (?=...) admits only letters, as marks such as vowel signs belong to a script, too.
        num_in_script = len(regex.findall(rf"(?=\p{{L}})\p{{Script={limits.script}}}", text))
    except regex.error:
        raise ValueError(f"--script {limits.script!r} is not a Unicode script") from None
    num_letters = len(regex.findall(r"\p{L}", text))
    if num_in_script < limits.min_script * max(num_letters, 1):  # 1, so that a text without letters is dropped
        raise Drop(f"not {limits.script}")
    return text


RULES: dict[str, Rule] = {
    "mojibake": mojibake,  # first, because `control` removes signs of a wrong encoding
    "nfkc": nfkc, "control": control, "whitespace": whitespace,
    "html": partial(_limit_share, html_characters, "max_markup", "html"),
    "base64": partial(_limit_share, encoded_characters, "max_encoded", "base64"),
    "urls": partial(_limit_share, url_characters, "max_urls", "urls"),
    "repeated": repeated, "length": length, "script": script,
}  # fmt: skip
DEFAULT_RULES = tuple(name for name in RULES if name != "nfkc")


class Outcome(NamedTuple):
    """Result of cleaning one document.

    text: the cleaned document, None if it is dropped. reason: why it is dropped. changed: names of the rules that
    changed it.
    """

    text: str | None
    reason: str = ""
    changed: tuple[str, ...] = ()


def clean(text: str, rules: Collection[str] = DEFAULT_RULES, limits: Limits | None = None) -> Outcome:
    """Apply the rules named in `rules` to a document, in the order of RULES."""
    limits = limits or Limits()
    changed: list[str] = []
    for name, rule in RULES.items():
        if name not in rules:
            continue
        try:
            cleaned = rule(text, limits)
        except Drop as drop:
            return Outcome(None, str(drop), tuple(changed))
        if cleaned != text:
            changed.append(name)
        text = cleaned
    return Outcome(text, "", tuple(changed))
