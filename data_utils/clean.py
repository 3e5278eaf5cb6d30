"""Rules that a document goes through: each mends it, or says why it is dropped. All can be switched off.

A rule is a function (text, limits) -> text, or raises Drop. They run in the order of RULES.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Drop(Exception):
    """The document is left out; the argument is the reason."""


@dataclass(frozen=True)
class Limits:
    """Where the rules draw their lines. Shares are of characters, or of lines for `repeated`."""

    min_chars: int = 16
    max_chars: int = 10_000_000
    max_repeated: float = 0.3
    max_mojibake: float = 0.003
    script: str = "Han"
    min_script: float = 0.0  # of the letters; 0 switches the rule off


Rule = Callable[[str, Limits], str]

# Control characters but tab and newline; soft hyphens, invisible spaces and marks of direction; a byte order mark.
_INVISIBLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u00ad\u200b\u2060\ufeff\u202a-\u202e\u2066-\u2069]")
_BREAKS = re.compile("\r\n?|\u2028|\u2029|\x85")
# What UTF-8 looks like when it was read as Latin-1 or GBK, and GBK when it was read as something else.
_MOJIBAKE = re.compile(
    r"\ufffd|锟斤拷|烫烫烫|屯屯屯|[ÃÂ][\u0080-\u00bf]|â€[œ\u009d™˜”]|ï»¿|æ[\u0080-\u00bf]{2}|å[\u0080-\u00bf]{2}|ç[\u0080-\u00bf]{2}|è[\u0080-\u00bf]{2}"
)


def nfkc(text: str, _: Limits) -> str:
    """Full-width letters become plain ones, ligatures are taken apart. Chinese punctuation changes, too (，becomes ,)."""
    return unicodedata.normalize("NFKC", text)


def control(text: str, _: Limits) -> str:
    """Control and invisible characters go, line breaks become newlines."""
    return _INVISIBLE.sub("", _BREAKS.sub("\n", text))


def whitespace(text: str, _: Limits) -> str:
    """No spaces at line ends, at most one empty line, nothing around the text."""
    lines = "\n".join(line.rstrip() for line in text.split("\n"))
    return re.sub(r"\n{3,}", "\n\n", lines).strip()


def mojibake(text: str, limits: Limits) -> str:
    broken = sum(len(found) for found in _MOJIBAKE.findall(text))
    if broken > limits.max_mojibake * len(text):
        raise Drop("mojibake")
    return text


def repeated(text: str, limits: Limits) -> str:
    """A line that follows itself is kept once; a text that still repeats its lines too often is dropped."""
    lines = text.split("\n")
    kept = [line for i, line in enumerate(lines) if not line.strip() or i == 0 or line != lines[i - 1]]
    full = Counter(line.strip() for line in kept if len(line.strip()) > 1)
    total = sum(len(line) * count for line, count in full.items())
    again = sum(len(line) * (count - 1) for line, count in full.items())
    if again > limits.max_repeated * total:
        raise Drop("repeated lines")
    return "\n".join(kept)


def length(text: str, limits: Limits) -> str:
    if len(text) < limits.min_chars:
        raise Drop("too short")
    if len(text) > limits.max_chars:
        raise Drop("too long")
    return text


def script(text: str, limits: Limits) -> str:
    """Enough of the letters must be of one script. Raises ValueError without the package regex, or for no script."""
    if not limits.min_script:
        return text
    try:
        import regex
    except ImportError:
        raise ValueError("--min-script needs the package regex: pip install regex") from None
    try:
        wanted = len(regex.findall(rf"\p{{Script={limits.script}}}", text))
    except regex.error:
        raise ValueError(f"Unicode has no script named {limits.script!r}") from None
    if wanted < limits.min_script * max(len(regex.findall(r"\p{L}", text)), 1):
        raise Drop(f"not {limits.script}")
    return text


RULES: dict[str, Rule] = {
    "nfkc": nfkc, "control": control, "whitespace": whitespace, "mojibake": mojibake, "repeated": repeated,
    "length": length, "script": script,
}  # fmt: skip
DEFAULT_RULES = tuple(name for name in RULES if name != "nfkc")


class Outcome(NamedTuple):
    """text: None if dropped, because of `reason`. changed: the rules that changed it."""

    text: str | None
    reason: str = ""
    changed: tuple[str, ...] = ()


def clean(text: str, rules: Sequence[str] = DEFAULT_RULES, limits: Limits | None = None) -> Outcome:
    """One document through the rules named, in their own order."""
    limits = limits or Limits()
    changed: list[str] = []
    for name, rule in RULES.items():
        if name not in rules:
            continue
        try:
            after = rule(text, limits)
        except Drop as drop:
            return Outcome(None, str(drop), tuple(changed))
        if after != text:
            changed.append(name)
        text = after
    return Outcome(text, "", tuple(changed))
