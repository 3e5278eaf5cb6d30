"""Data stages: a blend of corpora that changes during the run (`--data-stages`).

The short form is `0: 0.8 a 0.2 b; 1M: 0.4 a 0.6 b 0.1 c`, where the numbers before the colons are consumed samples, or
tokens as in `1G tokens: ...`. A JSON file has the same content: `[{"samples": 0, "data": {"a": 0.8, "b": 0.2}}, ...]`.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from ..json_text import JsonError, brief, parse_json, shown, why_unread
from ..storage import is_url
from .fields import ConfigError

UNITS = ("samples", "tokens")
FACTORS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
LARGEST = 2**63  # samples are counted in int64
BEGIN = re.compile(r"\s*([\d_.]+(?:[eE]\+?\d+)?)\s*([kKMGBT]?)[\s_]*(samples|tokens)?\s*:(.*)", re.DOTALL)
# (weight, prefix) of each corpus; a weight of None means in proportion to size
Blend = tuple[tuple[str | None, str], ...]


class Stage(NamedTuple):
    """A blend that is in use from `begin` consumed samples or tokens on (`unit`)."""

    begin: int
    unit: str
    blend: Blend

    @property
    def name(self) -> str:
        """The begin of the stage in words, for messages."""
        return f"the stage at {self.begin} {self.unit}"

    @property
    def words(self) -> tuple[str, ...]:
        """The blend as the words of --data-path."""
        return tuple(word for pair in self.blend for word in pair if word is not None)

    def renamed(self, change: Callable[[str], str]) -> "Stage":
        """Return this stage with each prefix replaced by `change(prefix)`."""
        return self._replace(blend=tuple((weight, change(prefix)) for weight, prefix in self.blend))

    def in_samples(self, tokens: int) -> "Stage":
        """Return this stage with its begin in samples of `tokens` tokens: the first sample after a number of tokens."""
        return self if self.unit == "samples" else self._replace(begin=-(-self.begin // tokens), unit="samples")


@dataclass(frozen=True)
class Staged:
    """Training corpora in stages.

    held_out: words of the corpora whose documents --split divides to get validation and test data; None if training
    uses all documents.
    """

    stages: tuple[Stage, ...]
    held_out: tuple[str, ...] | None


def parse_stages(words: Sequence[str]) -> tuple[Stage, ...]:
    """Return the stages of --data-stages: the name of a JSON file, JSON text, or the short form.

    Raises ConfigError for invalid stages.
    """
    text = " ".join(words).strip()
    where = "--data-stages"
    if text.endswith(".json"):
        where = f"--data-stages {text}"
        text = _content(Path(text))
    stages = tuple(_of_json(text, where) if text.startswith("[") else _of_words(text, where))
    if not stages or stages[0].begin:
        raise ConfigError(f"{where}: the first stage must begin at 0")
    for before, after in zip(stages, stages[1:], strict=False):
        if before.unit == after.unit and after.begin <= before.begin:
            raise ConfigError(f"{where}: {after.name} follows {before.name}; put the stages in order")
    return stages


def prefixes_in(stages: Sequence[Stage]) -> list[str]:
    """Return the prefix of each corpus once, in the order of first use."""
    return list(dict.fromkeys(prefix for stage in stages for _, prefix in stage.blend))


def text_of(stages: Sequence[Stage]) -> str:
    """Return stages as JSON text, which `parse_stages` reads."""
    return json.dumps([{each.unit: each.begin, "data": _json_of(each.blend)} for each in stages], ensure_ascii=False)


def with_prefixes(text: str, change: Callable[[str], str]) -> str:
    """Return the stages in `text` with each prefix replaced by `change(prefix)`."""
    return text_of([each.renamed(change) for each in parse_stages([text])])


def _json_of(blend: Blend) -> Any:
    return {p: w for w, p in blend} if blend[0][0] is not None else [p for _, p in blend]


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--data-stages {brief(path)} cannot be read: {why_unread(error)}") from None


def _of_words(text: str, where: str) -> Iterator[Stage]:
    for part in text.split(";"):
        if not part.strip():
            continue
        this = brief(repr(part.strip()))
        match = BEGIN.match(part)
        if match is None:
            raise ConfigError(
                f"{where}: {this} must have a begin in samples or tokens, a colon and a blend, as in 0: 0.8 a 0.2 b"
            )
        number, factor, unit, rest = match.groups()
        begin = _whole(number, FACTORS[factor], f"{where}: {this}")
        words = rest.split()
        weighted = bool(words) and _is_float(words[0])
        if weighted and len(words) % 2:
            raise ConfigError(f"{where}: {this} must be pairs of a weight and a prefix, as in 0.8 a 0.2 b")
        if not weighted and any(_is_float(word) for word in words):
            raise ConfigError(f"{where}: {this} must be pairs of a weight and a prefix, as in 0.8 a 0.2 b")
        pairs = list(zip(words[::2], words[1::2], strict=True)) if weighted else [(None, word) for word in words]
        yield _stage(begin, unit or "samples", pairs, where)


def _of_json(text: str, where: str) -> Iterator[Stage]:
    try:
        content = parse_json(text, where, list)
    except JsonError as error:
        raise ConfigError(str(error)) from None
    for entry in content:
        units = [unit for unit in UNITS if isinstance(entry, dict) and unit in entry]
        if len(units) != 1 or set(entry) != {units[0], "data"}:
            raise ConfigError(f'{where}: {shown(entry, 80)} must have the keys "data" and either "samples" or "tokens"')
        data = entry["data"]
        if not isinstance(data, dict) and not (isinstance(data, list) and all(isinstance(p, str) for p in data)):
            raise ConfigError(f'{where}: "data" must be {{"PREFIX": WEIGHT, ...}} or ["PREFIX", ...]')
        pairs = [(str(w), p) for p, w in data.items()] if isinstance(data, dict) else [(None, str(p)) for p in data]
        yield _stage(_whole(str(entry[units[0]]), 1, where), units[0], pairs, where)


def _stage(begin: int, unit: str, pairs: Sequence[tuple[str | None, str]], where: str) -> Stage:
    """Return a stage without the corpora of weight 0. Raises ConfigError for an invalid blend."""
    pairs = [(weight, prefix if is_url(prefix) else os.path.normpath(prefix)) for weight, prefix in pairs]
    stage = Stage(begin, unit, tuple(pairs))
    seen: set[str] = set()
    for weight, prefix in pairs:
        if weight is not None and _number(weight) is None:
            raise ConfigError(
                f"{where}: {stage.name} has the weight {brief(weight)} for {brief(prefix)}; weights are numbers, "
                f"0 or more"
            )
        if prefix in seen:
            raise ConfigError(
                f"{where}: {stage.name} names {brief(prefix)} twice; name it once, with the sum of its weights"
            )
        seen.add(prefix)
    blend = tuple((w, p) for w, p in pairs if w is None or _number(w))
    if not blend:
        raise ConfigError(f"{where}: {stage.name} has no corpus with a weight above 0")
    return stage._replace(blend=blend)


def _is_float(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _number(word: str) -> Fraction | None:
    """Parse `word` as a finite decimal number of at least 0; return None if it is not one."""
    if not _is_float(word) or not 0 <= float(word) < float("inf"):
        return None
    return Fraction(word) if float(word) else Fraction(0)


def _whole(number: str, factor: int, where: str) -> int:
    found = _number(number.replace("_", ""))
    if found is None or (found * factor).denominator != 1:
        raise ConfigError(f"{where}: {brief(number)} is not a whole number, 0 or more")
    if found * factor >= LARGEST:
        raise ConfigError(f"{where}: {brief(number)} must be less than 2**63")
    return int(found * factor)
