"""Table of all settings of several runs. It marks settings that differ between runs or from the default."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron.config import Config
from megatron.config.fields import flag

RUN_PATHS = {"run_dir", "save", "load"}  # paths, which always differ between runs, so the table does not mark them


class Setting(NamedTuple):
    """One setting and its value in each run.

    differs: whether the runs have different values. changed: whether at least one value is not the default.
    """

    section: str
    flag: str
    values: list[str]
    differs: bool
    changed: bool


def compare_settings(configs: Sequence[Config]) -> list[Setting]:
    """Return every setting with its values in the runs, in the order of `--help`."""
    settings_of_runs = [config.to_dict() for config in configs]
    settings = []
    for section, defaults in Config().to_dict().items():
        for name, default in defaults.items():
            first = settings_of_runs[0][section][name]
            texts = []
            differs = False
            changed = False
            for run_settings in settings_of_runs:
                value = run_settings[section][name]
                texts.append(_format_value(value))
                # Both remain True after the first run for which they hold. Several runs have paths of their own.
                differs |= value != first and name not in RUN_PATHS
                changed |= value != default and (len(configs) == 1 or name not in RUN_PATHS)
            settings.append(Setting(section, flag(name), texts, differs, changed))
    return settings


def _format_value(value: Any) -> str:
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
