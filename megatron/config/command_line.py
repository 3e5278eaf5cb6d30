"""Parsing of a command line, which has one flag per setting, and of JSON files into a Config.

Precedence: defaults < `--config FILE` < flags. If a flag is given several times, its last value wins.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from .. import presets
from .._compat import compat
from ..storage import PathError, require_local
from . import ineffective, mup
from .fields import ConfigError
from .flags import read_flags
from .messages import format_problems
from .names import HOME, RENAMED, nearest, refuse_removed, replace_renamed_flags, unknown_arguments
from .parallel import accept_any_schedule
from .places import location_problems
from .sections import Config
from .settings_files import parse_settings, read_json, read_settings
from .source import given_in_files, merge, new_source, with_family

__all__ = ["HOME", "RENAMED", "from_file", "nearest", "parse", "read_json", "refuse_removed", "with_values"]


def parse(
    argv: Sequence[str],
    defaults: Mapping[str, Any] | None = None,
    ranks: int = 1,
    notify: Callable[[str], None] = lambda note: None,
) -> Config:
    """Return the configuration that the arguments `argv` describe.

    defaults: settings whose defaults the entry script overrides, with their values.
    ranks: world size, on which the translation of some flags of other frameworks depends; --dry-run replaces it. 0 if
    it is unknown: the run is taken to have one replica.
    notify: function that is called with each note, e.g. on how a flag of another framework was translated.
    Raises ConfigError with one sentence, or one line per invalid argument.
    """
    # Read the sources: defaults of the entry script, files of --config, flags.
    defaults = defaults or {}
    words, notes = replace_renamed_flags(argv)
    flags = read_flags(words)
    cli = new_source(flags.settings, flags.foreign)
    cli.translate_all(flags.foreign)
    files = [read_settings(path, cli.values) for path in config_file_paths(flags.files)]
    sources = [parse_settings(defaults, "args_defaults"), *files]
    values, dropped_notes = merge(sources, cli)
    problems = list(unknown_arguments(flags.unknown))
    for source in sources:
        notes += [f"{source.where}: {note}" for note in source.notes]
        problems += [f"{source.where}: {problem}" for problem in source.problems]

    # Build the configuration. Deferred flags may complete a valid combination of settings, so it is checked after them.
    try:
        config = with_values_unchecked(Config(), values)
        ranks = values.get("dry_run") or ranks or config.parallel.fewest_ranks
        config = cli.apply_deferred(config, ranks, with_values_unchecked)
        config = replace(config)  # checks the combination of all settings
        config = config.with_derived_iters(ranks)
        cli.problems += _command_line_problems(config, defaults.get("family"))
    except ConfigError as error:
        cli.problems.append(str(error))
    problems += cli.problems
    if problems:
        raise ConfigError(format_problems(problems, "errors in the settings"))

    # Pass on the notes of all steps, now that the settings are valid.
    notes += [*dropped_notes, *mup.notes(config.model, config.optim.optimizer == "muon")]
    set_by_user = set(cli.values).union(*(file.values for file in files))
    if flags.foreign:
        notes += compat("flags.defaults").notes(config, flags.foreign, set_by_user, defaults)
    notes += cli.notes
    given = given_in_files(files) | cli.values
    for note in [*notes, *ineffective.notes(config, ranks, given)]:
        notify(note)
    return config


def config_file_paths(names: Sequence[str]) -> list[str]:
    """Return the paths of the files that --config names."""
    try:
        return [str(presets.find_preset(require_local(name), "models")) for name in names]
    except PathError as error:
        raise ConfigError(f"--config {error}") from None


def values_of_files(names: Sequence[str]) -> dict[str, Any]:
    """Return the settings in the files that --config names, as name -> value. A later file overrides an earlier one."""
    values: dict[str, Any] = {}
    for path in config_file_paths(names):
        values |= parse_settings(read_json(path), path).values
    return values


def _command_line_problems(config: Config, script_family: str | None) -> Iterator[str]:
    """Yield the problems that are refused only on a command line, as config.json of older checkpoints may have them.

    script_family: family of the entry script.
    """
    family = config.model.family
    if script_family and family != script_family:
        yield f"this script trains only the family {script_family}, not --family {family}"
    optim = config.optim
    if optim.min_lr > optim.lr and optim.lr_decay_style != "constant":
        yield f"--min-lr {optim.min_lr:g} exceeds --lr {optim.lr:g}, the peak; give a smaller --min-lr"
    yield from location_problems(config)


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a copy of `config` with the given values, with all checks. Raises ConfigError.

    values: name of a setting, without section -> value.
    """
    return replace(with_values_unchecked(config, values))  # replace() checks the combination of all settings


def with_values_unchecked(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a copy of `config` with the given values; only each changed section is checked for itself."""
    values_of_section: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        values_of_section.setdefault(HOME[name], {})[name] = value  # HOME: name of a setting -> its section
    result = copy(config)  # replace(config) would check the combination of all settings
    for section, new_values in values_of_section.items():
        vars(result)[section] = replace(getattr(config, section), **new_values)  # not setattr(): Config is frozen
    return result


def from_file(path: str) -> Config:
    """Return the configuration in the config.json in the folder of a run, which may have moved. Raises ConfigError."""
    source = read_settings(path, {})
    values = source.values | source.implied_settings(source.values)
    with accept_any_schedule():  # the script of the run may have registered a schedule
        return with_values(Config(), with_family(values))
