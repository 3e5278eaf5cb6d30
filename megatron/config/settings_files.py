"""Settings in JSON files, under the names of this project or of another framework."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .. import json_text, presets
from .._compat import compat
from ..json_text import brief
from ..storage import PathError, require_local
from .fields import ConfigError, flag, types_of
from .messages import format_flag
from .names import HOME, ONCE, REMOVED, RENAMED, nearest, removal_error
from .places import relocated
from .sections import SECTIONS, settings
from .source import Source, is_saved_by_run, new_source


def _none_values() -> dict[str, Any]:
    """Return setting -> the value that the word `none` stands for in a file: None, or the default of a tuple."""
    values: dict[str, Any] = {}
    for _, section, f in settings():
        kinds = types_of(section, f.name)
        if type(None) in kinds:
            values[f.name] = None
        if tuple in kinds:
            values[f.name] = f.default
    return values


_NONE_VALUES = _none_values()


def read_json(path: str, kind: type = dict) -> Any:
    """Return the content of the JSON file `path`: an object (dict), or a list if `kind` is list.

    Raises ConfigError, which names the file and line.
    """
    try:
        return json_text.read_json(Path(require_local(path)), kind)
    except (PathError, json_text.JsonError) as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}{_similar_files_hint(path)}") from None


def _similar_files_hint(path: str) -> str:
    """Return a hint that lists files named like `path` up to the last `_`, or all presets; "" without any."""
    missing = Path(path)
    if os.path.exists(path):  # False for a name that is too long, where Path.exists() raises OSError
        return ""
    # `gpt2_smal`, without a folder, may be the name of a preset.
    is_preset = missing.parent in (Path(), Path("configs/models"))
    folder = presets.preset_folder("models") if is_preset else missing.parent
    stem, underscore, _ = missing.stem.rpartition("_")
    files = sorted(folder.glob("*.json"))
    # For a missing gpt2_smal.json, list the files gpt2_*.json.
    names = [file.name for file in files if underscore and file.name.startswith(f"{stem}_")]
    # A name with .json is that of a file, perhaps of another flag than --config, such as --param-groups.
    if is_preset and not names and missing.suffix != ".json":
        names = [file.stem for file in files]  # all presets, without .json
    return "; there are " + ", ".join(names) if names else ""


@dataclass
class _FileSettings:
    """The settings of a file, sorted by kind: this project's, those of other frameworks, and removed ones."""

    where: str
    values: dict[str, Any] = field(default_factory=dict)
    foreign: dict[str, Any] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)

    def add(self, name: str, value: Any, section: str | None) -> None:
        """Add a setting. section: the section in which it stands, or None. Raises ConfigError for an unknown one."""
        name = RENAMED.get(name, name)
        known = list(HOME) if section is None else [f.name for f in fields(SECTIONS[section])]
        if name in known:
            if value == "none":
                # Settings outside the table keep the word: `none` is a choice of --router-balance, for example.
                value = _NONE_VALUES.get(name, value)
            self.values[name] = value
            return
        foreign_flag = compat("flags.translate").flag_of(name)  # None if no other framework has the setting
        if foreign_flag:
            # Other frameworks write null for flags that were not given.
            if value is not None:
                self.foreign[foreign_flag] = value
        elif name in REMOVED:
            if value is not None:  # earlier versions wrote null for it, too
                self.removed.append(name)
        elif section is not None:
            raise ConfigError(
                f"{self.where}: section {section!r} has no setting {brief(repr(name))}{nearest(name, known)}"
            )
        else:
            raise ConfigError(f"{self.where}: unknown setting {brief(repr(name))}{nearest(name, [*HOME, *SECTIONS])}")


# Setting that only another kind of file has -> what this file is, and how it is used.
OTHER_FILES = {
    "zero_optimization": "a ds_config: pass it as --deepspeed-config",
    "architectures": "of a Hugging Face model: import its folder with tools/convert_checkpoint.py --from-hf",
}


def parse_settings(content: Mapping[str, Any], where: str) -> Source:
    """Read settings, which may have the names of this project or of another framework.

    content: sections that contain settings, settings without a section, or both.
    where: the file's name, for messages.
    """
    sorted_settings = _FileSettings(where)
    for key, advice in OTHER_FILES.items():
        if key in content:
            raise ConfigError(f"{where} is {advice}")
    for key, value in content.items():
        if key in SECTIONS and isinstance(value, Mapping):
            for name, setting in value.items():
                sorted_settings.add(name, setting, key)
        else:
            sorted_settings.add(key, value, None)
    source = new_source(sorted_settings.values, sorted_settings.foreign, where)
    for name in sorted_settings.removed:
        if REMOVED[name]:
            source.problems.append(removal_error(name))
        else:
            source.notes.append(f"{flag(name)} has been removed and has no effect")
    source.translate_all(sorted_settings.foreign)
    source.problems += [f"{name} depends on other settings; give it as a flag" for name in source.deferred_flags()]
    return source


def read_settings(path: str, given: Mapping[str, Any]) -> Source:
    """Return the settings in the JSON file `path`. given: those of the command line.

    The config.json of a run describes the run in its folder, even if the folder was moved or copied. The run that
    starts may be this run, or a new one, in another run directory, with the same settings.
    """
    source = parse_settings(read_json(path), path)
    saved_dir = source.values.get("run_dir")  # the run directory when the file was saved
    if Path(path).name != "config.json" or not isinstance(saved_dir, str) or not is_saved_by_run(source):
        return source  # no run has saved this file in its folder
    names_data = given.get("data_path") or given.get("train_data_path")
    replaces_stages = names_data and not given.get("data_stages")
    if replaces_stages and source.values.pop("data_stages", None):
        source.notes.append("--data-stages has no effect, as another flag names the training data")
    folder = str(Path(path).parent)
    run_dir = given.get("run_dir") or folder
    if _is_same(run_dir, saved_dir):  # the run continues where it was
        return source
    if not _is_same(folder, saved_dir):  # the folder was moved or copied, so the paths into it are adapted
        source.values = relocated(source.values, saved_dir, folder)
    if _is_same(run_dir, folder):
        source.notes.append(f"the run directory {saved_dir} was moved or copied, so the run continues in {folder}")
        return source
    # A new run starts in `run_dir`. It does not use what is only for the saved run: folders, bad batches, ONCE.
    unused = []
    for name in ("save", "load", "tensorboard_dir", "skip_iterations", "skip_samples", *ONCE):
        value = source.values.pop(name, None)
        if value and value != ONCE.get(name):  # a default value needs no note
            unused.append(format_flag(flag(name), value))
    if unused:
        source.notes.append(f"the run in {run_dir} does not use {', '.join(unused)}")
    return source


def _is_same(folder: str, other: str) -> bool:
    return Path(folder).resolve() == Path(other).resolve()
