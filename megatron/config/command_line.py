"""Parsing of a command line, which has one flag per setting, and of JSON files into a Config.

Precedence: defaults < `--config FILE` < flags. If a flag is given several times, its last value wins.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import Field, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

from .. import presets
from .._compat import compat
from ..json_text import brief
from ..storage import PathError, require_local
from . import ineffective, mup
from .fields import ConfigError, OneOf, flag, format_problems, types_of
from .names import HOME, RENAMED, nearest, refuse_removed, replace_renamed_flags, unknown_arguments
from .places import location_problems
from .sections import Config, settings
from .settings_files import parse_settings, read_json
from .source import given_in_files, merge, new_source, with_family

__all__ = [
    "HOME", "RENAMED", "SettingsParser", "build_parser", "from_file", "nearest", "parse", "read_json", "refuse_removed",
    "with_values",
]  # fmt: skip


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
    words, notes = replace_renamed_flags(argv)
    flags = read_flags(words)
    sources = [parse_settings(defaults or {}, "args_defaults")]
    for path in config_file_paths(flags.files):
        sources.append(parse_settings(read_json(path), path))
    cli = new_source(flags.settings, flags.foreign)
    cli.translate_all(flags.foreign)
    values, dropped_notes = merge(sources, cli)
    problems = unknown_arguments(flags.unknown)
    for source in sources:
        notes += [f"{source.where}: {note}" for note in source.notes]
        problems += [f"{source.where}: {problem}" for problem in source.problems]
    try:
        # Deferred flags may complete a valid combination of settings, so it is checked after them.
        config = with_values(Config(), values, checked=False)
        ranks = values.get("dry_run") or ranks or config.parallel.fewest_ranks
        config = replace(cli.apply_deferred(config, ranks, partial(with_values, checked=False)))
        config = config.with_batches(ranks)
        cli.problems += _command_line_problems(config, (defaults or {}).get("family"))
    except ConfigError as error:
        cli.problems.append(str(error))
    problems += cli.problems
    if problems:
        raise ConfigError(format_problems(problems, "errors in the settings"))
    notes += [*dropped_notes, *mup.notes(config.model, config.optim.optimizer == "muon")]
    files = sources[1:]  # the first source holds the defaults of the entry script
    set_by_user = set(cli.values).union(*(source.values for source in files))
    if flags.foreign:
        notes += compat("flags.defaults").notes(config, flags.foreign, set_by_user, defaults or {})
    notes += cli.notes
    given = {**given_in_files(files), **cli.values}
    for note in [*notes, *ineffective.notes(config, ranks, given)]:
        notify(note)
    return config


class _Flags(NamedTuple):
    """The content of a command line: settings, flags of other frameworks, files of --config, and unknown words."""

    settings: dict[str, Any]
    foreign: dict[str, Any]
    files: list[str]
    unknown: list[str]


def read_flags(words: Sequence[str]) -> _Flags:
    """Parse the words of a command line. Flags of other frameworks are known only if there is an unknown one."""
    namespace, unknown = build_parser(foreign=False).parse_known_args(words)
    if unknown:  # flags of another framework, or mistakes
        namespace, unknown = build_parser().parse_known_args(words)
    values = vars(namespace)
    values.pop("local_rank", None)  # no setting: launchers pass it
    foreign = values.pop("foreign", {})
    files = values.pop("config", [])
    return _Flags(values, foreign, files, unknown)


def config_file_paths(names: Sequence[str]) -> list[str]:
    """Return the paths of the files that --config names."""
    try:
        return [str(presets.find_preset(require_local(name), "models")) for name in names]
    except PathError as error:
        raise ConfigError(f"--config {error}") from None


def _command_line_problems(config: Config, script_family: str | None) -> list[str]:
    """Return the problems that only a command line can have: checkpoints of earlier versions, which accepted such
    settings, must stay readable.

    script_family: family of the entry script.
    """
    problems = []
    family = config.model.family
    if script_family and family != script_family:
        problems.append(f"this script trains only the family {script_family}, not --family {family}")
    optim = config.optim
    if optim.min_lr > optim.lr and optim.lr_decay_style != "constant":
        problems.append(f"--min-lr {optim.min_lr:g} exceeds --lr {optim.lr:g}, the peak; give a smaller --min-lr")
    return [*problems, *location_problems(config)]


def with_values(config: Config, values: Mapping[str, Any], checked: bool = True) -> Config:
    """Return a copy of `config` with the given values; `values` maps names of settings, without section, to values.

    checked: check combinations of settings of several sections, and raise ConfigError.
    """
    by_section: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        by_section.setdefault(HOME[name], {})[name] = value
    changed = {name: replace(getattr(config, name), **section_values) for name, section_values in by_section.items()}
    if checked:
        return replace(config, **changed)
    result = copy(config)
    vars(result).update(changed)
    return result


def from_file(path: str) -> Config:
    """Return the configuration in a config.json that a run wrote to its folder. Raises ConfigError."""
    source = parse_settings(read_json(path), path)
    values = {**source.values, **source.implied_settings(source.values)}
    return with_values(Config(), with_family(values))


class SettingsParser(argparse.ArgumentParser):
    """Parser that raises ConfigError for a mistake instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(brief(message, 500))


def build_parser(foreign: bool = True) -> argparse.ArgumentParser:
    """Return a parser with one flag per setting; its result contains only the flags that are given.

    foreign: accept flags of other frameworks, too.
    """
    parser = SettingsParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", action="append", metavar="FILE")
    for _, section, f in settings():
        parser.add_argument(flag(f.name), **_argument_options(section, f))
    # Launchers pass this flag to every process. It is ignored, as the environment has the rank.
    parser.add_argument("--local_rank", "--local-rank", type=int)
    if foreign:
        compat("flags.translate").add_foreign_flags(parser)
    return parser


def _argument_options(section: type, setting: Any) -> dict[str, Any]:
    """Return the arguments of `add_argument` for a setting."""
    kinds = types_of(section, setting.name)
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    kind = next(each for each in kinds if each is not type(None))  # int for `int | None`
    options: dict[str, Any] = {"metavar": metavar(setting, kind)}
    if kind is tuple:
        return options | {"nargs": "+", "type": str, "action": partial(_WordsAction, none_value=setting.default)}
    return options | {"type": _or_word_none(kind) if type(None) in kinds else kind}


def _or_word_none(kind: type) -> Callable[[str], Any]:
    """Return a function that converts the word `none` to None and any other word to `kind`.

    The word `none` after a flag removes an optional setting that a --config file sets.
    """

    def convert(word: str) -> Any:
        return None if word == "none" else kind(word)

    convert.__name__ = kind.__name__  # argparse prints this name in its own messages
    return convert


class _WordsAction(argparse.Action):
    """Argument that takes several words, or the single word `none`, which stands for the setting's default."""

    def __init__(self, *args: Any, none_value: tuple[str, ...] | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.none_value = none_value

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, self.none_value if values == ["none"] else values)


def metavar(setting: "Field[Any]", kind: type) -> str:
    """Return the placeholder that `--help` shows for a setting's value: its choices or its type."""
    check = setting.metadata["check"]
    if isinstance(check, OneOf):
        return "{" + ",".join(str(choice) for choice in check.choices if choice is not None) + "}"
    if kind is not tuple:
        return kind.__name__.upper()
    if setting.name.endswith("_path"):
        return "PATH"
    return "A-B" if setting.name.startswith("skip_") else "NAME"  # --skip-iterations and --skip-samples take ranges
