"""Settings of single weights, chosen by patterns of their names (`--param-groups`): rate, weight decay and freezing.

The file holds a list such as `[{"pattern": "layers.[01].*", "frozen": true}, {"pattern": "head.*", "lr_factor": 0.1}]`.
"""

import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from ..json_text import brief, format_value
from .fields import ConfigError, problems_where, raise_first_problem
from .names import nearest
from .settings_files import read_json


class ParamRule(NamedTuple):
    """Settings of the weights whose names match `pattern`; None leaves a setting unchanged.

    pattern: `*` matches any text, dots included, `?` one character and `[01]` one of these characters.
    lr_factor: factor of the learning rate. weight_decay: replaces --weight-decay, for biases and norms too.
    frozen: the weights are not trained.
    """

    pattern: str
    lr_factor: float | None = None
    weight_decay: float | None = None
    frozen: bool | None = None

    def override(self, other: "ParamRule") -> "ParamRule":
        """Return the settings of `other`, replaced by those settings that this rule has."""
        return other._replace(**{name: value for name, value in self._asdict().items() if value is not None})

    def __str__(self) -> str:
        settings = []
        for name, value in self._asdict().items():
            if value is not None and name != "pattern":
                settings.append(f"{name} {json.dumps(value)}")
        return ", ".join(settings)


def read_param_rules(path: str) -> tuple[ParamRule, ...]:
    """Return the rules in the JSON file `path`. Raises ConfigError, which names the file and the entry."""
    rules = []
    for index, entry in enumerate(read_json(path, list)):
        where = f"--param-groups {path}: entry {index}"
        if not isinstance(entry, dict) or not isinstance(entry.get("pattern"), str):
            raise ConfigError(f'{where} must be an object with the key "pattern", a pattern of names')
        raise_first_problem(_entry_problems(entry, where))
        rules.append(ParamRule(**entry))
    if not rules:
        raise ConfigError(f"--param-groups {path} holds an empty list; add an entry or leave the flag out")
    return tuple(rules)


def _entry_problems(entry: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yield an error text for each mistake in an entry of the file."""
    for key in entry:
        if key not in ParamRule._fields:
            yield f"{where} has the unknown key {brief(repr(key))}{nearest(key, ParamRule._fields)}"
    for name in ("lr_factor", "weight_decay"):
        rate = entry.get(name, 0)  # 0 is valid, so a missing key is no problem
        # `type` instead of isinstance(), for which True is an int. The largest float excludes infinity.
        if type(rate) not in (int, float) or not 0 <= rate <= sys.float_info.max:
            yield f"{where}: {name} must be a number, 0 or more, not {format_value(rate)}"
    frozen = entry.get("frozen", False)
    yield from problems_where(
        (not isinstance(frozen, bool), f"{where}: frozen must be true or false, not {format_value(frozen)}"),
        # An entry of one key has only the pattern.
        (len(entry) == 1, f"{where} sets nothing; give lr_factor, weight_decay or frozen"),
        (
            frozen and len(entry) > 2,  # more keys than pattern and frozen
            f"{where}: frozen weights have no learning rate and no weight decay; leave these keys out",
        ),
    )


def match_rules(rules: Iterable[ParamRule], names: Collection[str]) -> dict[str, ParamRule]:
    """Return the settings of each of `names` that a rule matches; later rules override earlier ones, key by key."""
    settings: dict[str, ParamRule] = {}
    for rule in rules:
        for name in names:
            if fnmatchcase(name, rule.pattern):
                earlier = settings.get(name)
                settings[name] = rule if earlier is None else rule.override(earlier)
    return settings


def describe_rules(path: str, rules: Collection[ParamRule], sizes: Mapping[str, int]) -> list[str]:
    """Return lines that count the weights of each rule, and the weights without a rule.

    sizes: number of elements of each weight of the whole model, by name.
    Raises ValueError for patterns that match no weight, and if no weight is left to train.
    """
    lines = []
    unused_patterns = []
    for rule in rules:
        names = [name for name in sizes if fnmatchcase(name, rule.pattern)]
        lines.append(f"--param-groups {rule.pattern}: {rule} ({_describe_count(names, sizes)})")
        if not names:
            unused_patterns.append(rule.pattern)
    if unused_patterns:
        raise ValueError(
            f"--param-groups {path}: no weight matches {', '.join(unused_patterns)}; names are those of "
            f"checkpoint.json, such as {next(iter(sizes))}"  # the first weight, as an example
        )
    matched = match_rules(rules, sizes)
    without_rule = [name for name in sizes if name not in matched]
    # A weight without a rule is trained.
    if not without_rule and all(rule.frozen for rule in matched.values()):
        raise ValueError(f"--param-groups {path} freezes all weights; leave at least one weight to train")
    return [*lines, f"--param-groups no pattern: the defaults ({_describe_count(without_rule, sizes)})"]


def _describe_count(names: Collection[str], sizes: Mapping[str, int]) -> str:
    """Return the number of weights and of their parameters, in words."""
    millions = sum(sizes[name] for name in names) / 1e6
    return f"{len(names)} weight{'' if len(names) == 1 else 's'}, {millions:.2f} million parameters"
