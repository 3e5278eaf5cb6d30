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
    entries = [{stage.unit: stage.begin, "data": _json_of(stage.blend)} for stage in stages]
    return json.dumps(entries, ensure_ascii=False)


def with_prefixes(text: str, change: Callable[[str], str]) -> str:
    """Return the stages in `text` with each prefix replaced by `change(prefix)`."""
    return text_of([each.renamed(change) for each in parse_stages([text])])


def _json_of(blend: Blend) -> Any:
    if blend[0][0] is None:
        return [prefix for _, prefix in blend]
    return {prefix: weight for weight, prefix in blend}


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--data-stages {brief(path)} cannot be read: {why_unread(error)}") from None


def _of_words(text: str, where: str) -> Iterator[Stage]:
    for part in text.split(";"):
        if part.strip():
            yield _of_part(part, where)


def _of_part(part: str, where: str) -> Stage:
    """Parse one stage of the short form, such as `1M: 0.4 a 0.6 b`."""
    this = f"{where}: {brief(repr(part.strip()))}"
    match = BEGIN.match(part)
    if match is None:
        raise ConfigError(f"{this} must have a begin in samples or tokens, a colon and a blend, as in 0: 0.8 a 0.2 b")
    number, factor, unit, rest = match.groups()
    begin = _whole(number, FACTORS[factor], this)
    words = rest.split()
    pairs: list[tuple[str | None, str]] = [(None, word) for word in words]
    numbers = [_is_float(word) for word in words]
    if any(numbers):
        if not numbers[0] or len(words) % 2:
            raise ConfigError(f"{this} must be pairs of a weight and a prefix, as in 0.8 a 0.2 b")
        pairs = list(zip(words[::2], words[1::2], strict=True))
    return _stage(begin, unit or "samples", pairs, where)


def _of_json(text: str, where: str) -> Iterator[Stage]:
    try:
        content = parse_json(text, where, list)
    except JsonError as error:
        raise ConfigError(str(error)) from None
    for entry in content:
        keys = set(entry) if isinstance(entry, dict) else set()
        unit = "tokens" if "tokens" in keys else "samples"
        if keys != {unit, "data"}:
            raise ConfigError(f'{where}: {shown(entry, 80)} must have the keys "data" and either "samples" or "tokens"')
        begin = _whole(str(entry[unit]), 1, where)
        yield _stage(begin, unit, _pairs_of(entry["data"], where), where)


def _pairs_of(data: Any, where: str) -> list[tuple[str | None, str]]:
    """Return the pairs (weight, prefix) of a blend in JSON: an object with weights, or a list without weights."""
    if isinstance(data, dict):
        return [(str(weight), prefix) for prefix, weight in data.items()]
    if isinstance(data, list) and all(isinstance(prefix, str) for prefix in data):
        return [(None, prefix) for prefix in data]
    raise ConfigError(f'{where}: "data" must be {{"PREFIX": WEIGHT, ...}} or ["PREFIX", ...]')


def _stage(begin: int, unit: str, pairs: Sequence[tuple[str | None, str]], where: str) -> Stage:
    """Return a stage without the corpora of weight 0. Raises ConfigError for an invalid blend."""
    blend: list[tuple[str | None, str]] = []
    seen: set[str] = set()
    name = Stage(begin, unit, ()).name
    for weight, word in pairs:
        prefix = word if is_url(word) else os.path.normpath(word)
        share = None if weight is None else _number(weight)
        if weight is not None and share is None:
            raise ConfigError(
                f"{where}: {name} has the weight {brief(weight)} for {brief(prefix)}; weights are numbers, 0 or more"
            )
        if prefix in seen:
            raise ConfigError(f"{where}: {name} names {brief(prefix)} twice; name it once, with the sum of its weights")
        seen.add(prefix)
        if share != 0:
            blend.append((weight, prefix))
    if not blend:
        raise ConfigError(f"{where}: {name} has no corpus with a weight above 0")
    return Stage(begin, unit, tuple(blend))


def _is_float(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _number(word: str) -> Fraction | None:
    """Parse `word` as a finite decimal number of at least 0; return None if it is not one."""
    if not _is_float(word):
        return None
    number = float(word)
    if not 0 <= number < float("inf"):
        return None
    return Fraction(word) if number else Fraction(0)


def _whole(number: str, factor: int, where: str) -> int:
    found = _number(number.replace("_", ""))
    if found is None or (found * factor).denominator != 1:
        raise ConfigError(f"{where}: {brief(number)} is not a whole number, 0 or more")
    if found * factor >= LARGEST:
        raise ConfigError(f"{where}: {brief(number)} must be less than 2**63")
    return int(found * factor)
