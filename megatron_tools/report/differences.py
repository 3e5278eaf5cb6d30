"""Table of all settings of several runs. It marks settings that differ between runs or from the default."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron.config import Config
from megatron.config.fields import flag

APART = {"run_dir", "save", "load"}  # paths, which always differ between runs, so the table does not mark them


class Setting(NamedTuple):
    """One setting and its value in each run.

    differs: whether the runs have different values. changed: whether at least one value is not the default.
    """

    section: str
    flag: str
    values: list[str]
    differs: bool
    changed: bool


def settings(configs: Sequence[Config]) -> list[Setting]:
    """Return every setting with its values in the runs, in the order of `--help`."""
    dicts: list[dict[str, dict[str, Any]]] = [config.to_dict() for config in configs]
    found = []
    for section, defaults in Config().to_dict().items():
        for name, default in defaults.items():
            first = dicts[0][section][name]
            words = []
            differs = False
            changed = False
            for each in dicts:
                value = each[section][name]
                words.append(_word(value))
                differs |= value != first and name not in APART
                changed |= value != default
            found.append(Setting(section, flag(name), words, differs, changed))
    return found


def _word(value: Any) -> str:
    """Return the value of a setting as shown in the table, such as `yes` for True."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        return value
    return json.dumps(value)
