"""Data stages: a blend of corpora that changes during the run (`--data-stages`).

The short form is `0: 0.8 a 0.2 b; 1M: 0.4 a 0.6 b 0.1 c`, where the numbers before the colons are consumed samples, or
tokens as in `1G tokens: ...`. A JSON file has the same content: `[{"samples": 0, "data": {"a": 0.8, "b": 0.2}}, ...]`.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ..json_text import JsonError, brief, format_value, parse_json, why_unreadable
from ..storage import is_url
from .batches import NOTHING_CONSUMED, Consumed
from .fields import ConfigError

UNIT_FACTORS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
MAX_SAMPLES = 2**63  # samples are counted in int64
STAGE_PATTERN = re.compile(r"\s*([\d_.]+(?:[eE]\+?\d+)?)\s*([kKMGBT]?)[\s_]*(samples|tokens)?\s*:(.*)", re.DOTALL)
Pair = tuple[str | None, str]  # (weight, prefix) of a corpus; a weight of None means in proportion to size
Blend = tuple[Pair, ...]


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

    def replace_prefixes(self, change: Callable[[str], str]) -> "Stage":
        """Return this stage with each prefix replaced by `change(prefix)`."""
        return self._replace(blend=tuple((weight, change(prefix)) for weight, prefix in self.blend))

    def in_samples(self, tokens: int, consumed: Consumed = NOTHING_CONSUMED) -> "Stage":
        """Return this stage with its begin in samples of `tokens` tokens: the first sample after a number of tokens.

        consumed: what a resumed run has consumed, whose samples may have had another length.
        """
        if self.unit == "samples":
            return self
        begin = math.ceil(consumed.sample_at(self.begin, tokens))  # 5 tokens in samples of 2 tokens give sample 3
        return self._replace(begin=begin, unit="samples")


@dataclass(frozen=True)
class StagedCorpora:
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
        path = Path(text)
        try:
            text = path.read_text(encoding="utf-8-sig").strip()
        except (OSError, ValueError) as error:
            raise ConfigError(f"--data-stages {brief(path)} cannot be read: {why_unreadable(error)}") from None
    if text.startswith(("[", "{")):  # the JSON parser refuses an object, for which the short form has no meaning
        stages = tuple(_parse_json_stages(text, where))
    else:
        stages = tuple(_parse_short_stage(part, where) for part in text.split(";") if part.strip())
    if not stages or stages[0].begin:
        raise ConfigError(f"{where}: the first stage must begin at 0")
    for before, after in pairwise(stages):
        # Samples and tokens can be compared only once the number of tokens in a sample is known.
        if before.unit == after.unit and after.begin <= before.begin:
            raise ConfigError(f"{where}: {after.name} follows {before.name}; put the stages in order")
    return stages


def prefixes_in(stages: Sequence[Stage]) -> list[str]:
    """Return the prefix of each corpus once, in the order of first use."""
    return list(dict.fromkeys(prefix for stage in stages for _, prefix in stage.blend))


def stages_as_json(stages: Sequence[Stage]) -> str:
    """Return stages as JSON text, which `parse_stages` reads."""
    entries = [{stage.unit: stage.begin, "data": _blend_as_json(stage.blend)} for stage in stages]
    return json.dumps(entries, ensure_ascii=False)


def replace_prefixes(text: str, change: Callable[[str], str]) -> str:
    """Return the stages in `text` with each prefix replaced by `change(prefix)`."""
    return stages_as_json([stage.replace_prefixes(change) for stage in parse_stages([text])])


def _blend_as_json(blend: Blend) -> Any:
    """Return a blend as `_parse_blend` reads it."""
    if blend[0][0] is None:  # either all corpora of a blend have weights, or none has
        return [prefix for _, prefix in blend]
    return {prefix: weight for weight, prefix in blend}


def _parse_short_stage(part: str, where: str) -> Stage:
    """Parse one stage of the short form, such as `1M: 0.4 a 0.6 b`."""
    stage_text = f"{where}: {brief(repr(part.strip()))}"
    match = STAGE_PATTERN.match(part)
    if match is None:
        raise ConfigError(
            f"{stage_text} must have a begin in samples or tokens, a colon and a blend, as in 0: 0.8 a 0.2 b"
        )
    number, suffix, unit, blend = match.groups()
    begin = _parse_whole_number(number, UNIT_FACTORS[suffix], stage_text)
    words = blend.split()
    pairs: list[Pair] = [(None, word) for word in words]
    is_number = list(map(_is_float, words))
    if any(is_number):  # 0.8 a 0.2 b: a weight, a prefix and so on; `_checked_stage` checks the other weights
        if not is_number[0] or len(words) % 2:
            raise ConfigError(f"{stage_text} must be pairs of a weight and a prefix, as in 0.8 a 0.2 b")
        pairs = list(zip(words[::2], words[1::2], strict=True))
    return _checked_stage(begin, unit or "samples", pairs, where)


def _parse_json_stages(text: str, where: str) -> Iterator[Stage]:
    """Yield the stages of JSON text; see the docstring of the module."""
    try:
        content = parse_json(text, where, list)
    except JsonError as error:
        raise ConfigError(str(error)) from None
    for entry in content:
        keys = set(entry) if isinstance(entry, dict) else set()
        unit = "tokens" if "tokens" in keys else "samples"
        if keys != {unit, "data"}:
            raise ConfigError(
                f'{where}: {format_value(entry, 80)} must have the keys "data" and either "samples" or "tokens"'
            )
        begin = _parse_whole_number(str(entry[unit]), 1, where)
        yield _checked_stage(begin, unit, _parse_blend(entry["data"], where), where)


def _parse_blend(data: Any, where: str) -> list[Pair]:
    """Return the pairs (weight, prefix) of a blend in JSON: an object with weights, or a list without weights."""
    if isinstance(data, dict):
        return [(str(weight), prefix) for prefix, weight in data.items()]
    if isinstance(data, list) and all(isinstance(prefix, str) for prefix in data):
        return [(None, prefix) for prefix in data]
    raise ConfigError(f'{where}: "data" must be {{"PREFIX": WEIGHT, ...}} or ["PREFIX", ...]')


def _checked_stage(begin: int, unit: str, pairs: Sequence[Pair], where: str) -> Stage:
    """Return a stage without the corpora of weight 0. Raises ConfigError for an invalid blend."""
    blend = []
    seen = set()
    name = Stage(begin, unit, ()).name
    for weight, word in pairs:
        prefix = word if is_url(word) else os.path.normpath(word)
        if _is_float(prefix):
            prefix = f"./{prefix}"  # else it would be taken for a weight
        share = None
        if weight is not None:
            share = _parse_finite_number(weight)
            if share is None:
                raise ConfigError(
                    f"{where}: {name} has the weight {brief(weight)} for {brief(prefix)}; weights are numbers, 0 or "
                    "more"
                )
        if prefix in seen:
            raise ConfigError(f"{where}: {name} names {brief(prefix)} twice; name it once, with the sum of its weights")
        seen.add(prefix)
        if share != 0:  # keeps a corpus without a weight (None), too
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


def _parse_finite_number(word: str) -> Fraction | None:
    """Parse `word` as a finite decimal number of at least 0; return None if it is not one."""
    if not _is_float(word):
        return None
    number = float(word)
    if not 0 <= number < float("inf"):
        return None
    # A word such as 1e-999999999 is 0 as a float. As a fraction, it would need gigabytes for its denominator.
    if number == 0:
        return Fraction(0)
    return Fraction(word)


def _parse_whole_number(number: str, factor: int, where: str) -> int:
    """Return `number` times `factor`: 1500 for 1.5K. Raises ConfigError unless it is whole and fits int64."""
    value = _parse_finite_number(number.replace("_", ""))
    if value is None or (value * factor).denominator != 1:  # 1.5K is a whole number
        raise ConfigError(f"{where}: {brief(number)} is not a whole number, 0 or more")
    if value * factor >= MAX_SAMPLES:
        raise ConfigError(f"{where}: {brief(number)} must be less than 2**63")
    return int(value * factor)
