"""Parsing of a command line and JSON files into a Config.

Precedence: defaults < `--config FILE` < flags. If a flag is given several times, its last value wins.
"""

import argparse
import difflib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from .. import json_text, presets
from ..json_text import brief
from ..storage import PlaceError, local
from . import ineffective, mup
from .decoder import unread
from .defaults import DEFAULTS
from .fields import ConfigError, OneOf, flag, listed, types_of
from .foreign.defaults import chosen
from .foreign.defaults import notes as megatron_notes
from .foreign.translate import Translation, add_to, flag_of, suggestion, written
from .model import with_family, without_t5s_objective
from .places import problems_with_places
from .sections import SECTIONS, Config, settings

HOME = {f.name: section for section, _, f in settings()}  # name of a setting -> name of its section
# Former name of a setting -> its new name. Flags, files, checkpoints and `get_args()` accept both for one version.
RENAMED = {"failed_saves": "max_failed_saves", "unfused": "reference_ops"}
DEFAULTS_OF_SCRIPT = "args_defaults"
# Former setting, which files of earlier versions contain -> what replaces it; "" if training never depended on it.
REMOVED = {
    "certificate": "",
    "without": "write a corpus without the documents with `tools/inspect_data.py drop` and name it in --data-path",
}
_MAY_BE_NONE = {f.name for _, section, f in settings() if type(None) in types_of(section, f.name)}
# Setting -> the value that the word `none` stands for in a file: None, or the default if the setting is a tuple.
_WITHOUT = dict.fromkeys(_MAY_BE_NONE) | {f.name: f.default for _, s, f in settings() if tuple in types_of(s, f.name)}


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` for the entry of `known` closest to `name`, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


class SettingsParser(argparse.ArgumentParser):
    """Parser that raises ConfigError for a mistake instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(brief(message, 500))


EXAMPLES = """\
examples:
  python {script} --data-path data/corpus_text_document --vocab-file tokenizer.model --run-dir runs/a
      one process, no pipeline; running the same command again resumes
  python tools/launch.py --standalone --nproc-per-node 4 {script} --pipe-parallel-size 2 \\
      --model-parallel-size 2 --config configs/models/gpt2_345M.json --data-path ... --vocab-file ...
      four ranks: two stages of two model-parallel ranks
  python {script} --config my.json --max-position-embeddings none ...
      none removes an optional setting that a file has set
"""


def build_parser(script: str | None = None, family: str | None = None) -> argparse.ArgumentParser:
    """Return a parser with one flag per setting; its result contains only the flags that are given.

    script, family: the entry script and the model family for which `--help` is shown. `--help` hides the settings of
    other families.
    """
    parser = SettingsParser(
        prog=script,
        usage=f"{script} [--config FILE] [FLAG VALUE ...]" if script else None,
        epilog=EXAMPLES.format(script=script) if script else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--config",
        action="append",
        metavar="FILE",
        help="JSON file with settings by section, or the name of a file in configs/models; may be repeated",
    )
    groups = {name: parser.add_argument_group(name) for name in SECTIONS}
    for name, section, f in settings():
        kinds = types_of(section, f.name)
        text = f"{f.metadata['help']} (default: {f.default})".replace("%", "%%")
        if family and f.metadata["family"] and family not in f.metadata["family"]:
            text = argparse.SUPPRESS
        if bool in kinds:
            groups[name].add_argument(flag(f.name), action=argparse.BooleanOptionalAction, help=text)
        else:
            kind = next(k for k in kinds if k is not type(None))
            many: dict[str, Any] = {"type": _or_none(kind) if f.name in _MAY_BE_NONE else kind}
            if kind is tuple:
                many = {"nargs": "+", "type": str, "action": partial(_Words, none=f.default)}
            groups[name].add_argument(flag(f.name), metavar=_metavar(f, kind), help=text, **many)
    # Launchers pass this flag to every process. It is ignored, as the environment has the rank.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    add_to(parser)
    return parser


def help_if_asked(family: str | None = None) -> None:
    """Print the settings of `family` (all settings if None) and exit if the command line has -h or --help."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        build_parser(Path(sys.argv[0]).name, family).parse_args(["--help"])


def _or_none(kind: type) -> Callable[[str], Any]:
    """Return a function that converts the word `none` to None and any other word to `kind`.

    The word `none` after a flag removes an optional setting that a --config file sets.
    """

    def read(word: str) -> Any:
        return None if word == "none" else kind(word)

    read.__name__ = kind.__name__  # argparse prints this name in its own messages
    return read


class _Words(argparse.Action):
    """Argument that takes several words, or the single word `none`, which stands for the setting's default."""

    def __init__(self, *args: Any, none: tuple[str, ...] | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.none = none

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, self.none if values == ["none"] else values)


def _metavar(setting: "Field[Any]", kind: type) -> str:
    """Return the placeholder that `--help` shows for a setting's value: its choices or its type."""
    if isinstance(check := setting.metadata["check"], OneOf):
        return "{" + ",".join(str(choice) for choice in check.choices if choice is not None) + "}"
    if kind is tuple:
        return "PATH" if setting.name.endswith("_path") else "A-B" if setting.name.startswith("skip_") else "NAME"
    return kind.__name__.upper()


def _there_are(path: str) -> str:
    """Return a hint that lists files named like `path` up to the last `_`, such as other sizes; "" if `path` exists."""
    wanted = Path(path)
    folder = presets.folder("models") if wanted.parent == Path("configs/models") else wanted.parent
    beside = sorted(folder.glob(f"{wanted.stem.rpartition('_')[0]}_*.json")) if "_" in wanted.stem else []
    return f"; there are {', '.join(each.name for each in beside)}" if beside and not wanted.exists() else ""


def read_json(path: str, kind: type = dict) -> Any:
    """Return the content of the JSON file `path`: an object (dict), or a list if `kind` is list.

    Raises ConfigError, which names the file and line.
    """
    try:
        return json_text.read_json(Path(local(path)), kind)
    except (PlaceError, json_text.JsonError) as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}{_there_are(path)}") from None


def _named(content: Mapping[str, Any], where: str) -> Translation:
    """Translate a settings file, in which settings may have the names of this project or of another framework.

    content: sections that contain settings, settings without a section, or both.
    where: the file's name, for messages.
    """
    values: dict[str, Any] = {}
    foreign: dict[str, Any] = {}
    removed: list[str] = []
    for key, value in content.items():
        here = value if key in SECTIONS and isinstance(value, Mapping) else {key: value}
        names = [f.name for f in fields(SECTIONS[key])] if here is value else list(HOME)
        for name, each in here.items():
            name = RENAMED.get(name, name)
            if name in names:
                values[name] = _WITHOUT[name] if each == "none" and name in _WITHOUT else each
            elif other := flag_of(name):
                foreign[other] = each
            elif name in REMOVED:
                removed += [name] if each is not None else []
            elif here is value:
                raise ConfigError(f"{where}: section {key!r} has no setting {brief(repr(name))}{nearest(name, names)}")
            else:
                raise ConfigError(f"{where}: unknown setting {brief(repr(name))}{nearest(name, [*HOME, *SECTIONS])}")
    found = Translation(values)
    for name in removed:
        _add_removed(found, name)
    # Other frameworks write null for flags that were not given.
    found.add_all({name: value for name, value in foreign.items() if value is not None})
    found.problems += [f"{name} depends on other settings; give it as a flag" for name in found.waiting()]
    return found


def _add_removed(found: Translation, name: str) -> None:
    """Add a problem for a removed setting in a file; add only a note if it had no effect on training."""
    if REMOVED[name]:
        found.problems.append(_removal(name))
    else:
        found.notes.append(f"{flag(name)} has been removed and has no effect")


def _removal(name: str) -> str:
    """Return an error for a removed setting."""
    advice = REMOVED[name] or "leave it out"
    return f"{flag(name)} has been removed: {advice}"


def refuse_removed(saved: Mapping[str, Any], where: Path) -> None:
    """Raise ConfigError if the settings of a run changed its samples by a setting that has been removed.

    saved: section -> the settings that the run saved, by name. where: the file that holds them, for the message.
    """
    sections = [values for values in saved.values() if isinstance(values, Mapping)]
    for name, advice in REMOVED.items():
        if advice and any(values.get(name) is not None for values in sections):
            raise ConfigError(f"{where}: {_removal(name)}")


def parse_of_any_family(argv: Sequence[str], ranks: int = 1) -> Config:
    """Return the configuration of a training command, with the defaults of the family that `argv` names, or of GPT-2.

    The command may begin with an entry script, such as pretrain_llama.py, which then names the family; any other script
    trains a custom model without a family. ranks, errors: see `parse`.
    """
    if argv and argv[0].endswith(".py"):
        family = Path(argv[0]).stem.removeprefix("pretrain_")
        argv = argv[1:]
        if family not in DEFAULTS:
            return parse(argv, None, ranks)
    else:
        family = _family_of(argv)
    return parse(argv, {"family": family, **DEFAULTS[family]}, ranks)


def _family_of(argv: Sequence[str]) -> str:
    """Return the family that --family, or else the last --config file with a family, names; gpt2 if none does."""
    given = vars(build_parser().parse_known_args(_with_new_names(argv)[0])[0])
    family = None
    for name in given.get("config", []):
        path = str(presets.find(local(name), "models"))
        family = _named(read_json(path), path).values.get("family", family)
    family = given.get("family", family)
    return family if family in DEFAULTS else "gpt2"


def parse(
    argv: Sequence[str],
    defaults: Mapping[str, Any] | None = None,
    ranks: int = 1,
    tell: Callable[[str], None] = lambda note: None,
) -> Config:
    """Return the configuration that the arguments `argv` describe.

    defaults: settings whose defaults the entry script overrides, with their values.
    ranks: world size, on which the translation of some flags of other frameworks depends.
    tell: function that is called with each note, e.g. on how a flag of another framework was translated.
    Raises ConfigError with one sentence, or one line per invalid argument.
    """
    words, notes = _with_new_names(argv)
    found, unknown = build_parser().parse_known_args(words)
    flags_given = vars(found)
    flags_given.pop("local_rank", None)
    problems = _unknown(unknown)
    foreign = flags_given.pop("foreign", {})
    names = flags_given.pop("config", [])
    try:
        files = [str(presets.find(local(name), "models")) for name in names]
    except PlaceError as error:
        raise ConfigError(f"--config {error}") from None
    contents = [(DEFAULTS_OF_SCRIPT, defaults or {}), *((path, read_json(path)) for path in files)]
    sources = [(where, _named(content, where)) for where, content in contents]
    line = Translation(flags_given)
    line.add_all(foreign)
    values, dropped = _merge(sources, line)
    for where, source in sources:
        notes += [f"{where}: {note}" for note in source.notes]
        problems += [f"{where}: {problem}" for problem in source.problems]
    notes += dropped
    try:
        config = line.settle(with_values(Config(), values), ranks, with_values)
        config = config.with_batches(ranks)
        given = {**_given_in_files(sources[1:]), **line.values}
        notes += mup.notes(config.model, config.optim.optimizer == "muon")
        idle = list(ineffective.notes(config, ranks, given))
        family = config.model.family
        own = (defaults or {}).get("family")
        if own and family != own:
            line.problems.append(f"this script trains only the family {own}, not --family {family}")
        _check_min_lr(config)
        line.problems += problems_with_places(config)
        decided = chosen(defaults or {}).union(line.values, *(source.values for _, source in sources[1:]))
        notes += megatron_notes(config, foreign, decided)
    except ConfigError as error:
        line.problems.append(str(error))
    problems += line.problems
    if problems:
        raise ConfigError(listed(problems, "errors in the settings"))
    for note in [*notes, *line.notes, *idle]:
        tell(note)
    return config


def _with_new_names(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return `argv` with renamed flags replaced by their new names, and a note for each renamed flag."""
    words = []
    notes = []
    for word in argv:
        old, equals, value = word.partition("=")
        new = next((flag(name) for former, name in RENAMED.items() if flag(former) == old), old)
        if new != old:
            notes.append(f"{old} is now {new}; the next version drops the old name")
        words.append(new + equals + value)
    return words, notes


def _check_min_lr(config: Config) -> None:
    """Raise ConfigError if the minimum learning rate exceeds the peak learning rate.

    `OptimConfig` does not check this: earlier versions accepted such settings, and their checkpoints must stay
    readable.
    """
    o = config.optim
    if o.min_lr > o.lr and o.lr_decay_style != "constant":
        raise ConfigError(f"--min-lr {o.min_lr:g} exceeds --lr {o.lr:g}, the peak; give a smaller --min-lr")


def _merge(sources: Sequence[tuple[str, Translation]], line: Translation) -> tuple[dict[str, Any], list[str]]:
    """Merge the settings of files and of the command line; return the merged settings and notes on dropped settings.

    The command line overrides files, and later files override earlier files. If the command line or a later file
    changes --rope-scaling, an earlier file may have set parameters that only the old method uses. Such parameters are
    dropped with a note, not refused.
    """
    values: dict[str, Any] = {}
    source_of: dict[str, str] = {}
    notes: list[str] = []
    for where, new in [
        *((where, without_t5s_objective(source.values)) for where, source in sources),
        ("", line.values),
    ]:
        scaling = new.get("rope_scaling", values.get("rope_scaling"))
        if scaling != values.get("rope_scaling"):
            for name in [each for each in unread(values, scaling) if each not in new]:
                unused = written(flag(name), values.pop(name))
                why = f"{written('--rope-scaling', scaling)} does not use it"
                notes.append(f"{source_of[name]}: {unused} has no effect: {why}")
        values |= new
        source_of |= dict.fromkeys(new, where)
    for _, source in sources:
        values |= source.follow(values, line.values)
    return values | line.follow(values, _given_in_files(sources[1:])), notes


def _given_in_files(sources: Sequence[tuple[str, Translation]]) -> dict[str, Any]:
    """Return the settings that the user's --config files give, without those of files that a run has saved.

    A file that a run has saved contains all settings. In a shorter file, a default value was chosen, too.
    """
    given: dict[str, Any] = {}
    for _, source in sources:
        if len(source.values) < len(HOME) / 2:
            given |= source.values
    return given


def _unknown(words: Sequence[str]) -> list[str]:
    """Return an error for each unknown flag among the words that the parser did not consume."""
    known = ["--config", *(flag(name) for name in HOME)]
    names = [word.split("=")[0] for word in words if word.startswith("--")] or list(words[:1])
    removed = {flag(name): _removal(name) for name in REMOVED}
    return [removed.get(name) or f"unknown argument {name}{suggestion(name, known)}" for name in names]


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a copy of `config` with the given values; `values` maps names of settings, without section, to values."""
    by_section: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        by_section.setdefault(HOME[name], {})[name] = value
    sections = {name: replace(getattr(config, name), **new) for name, new in by_section.items()}
    return replace(config, **sections)


def from_file(path: str) -> Config:
    """Return the configuration in a config.json that a run wrote to its folder. Raises ConfigError."""
    found = _named(read_json(path), path)
    return with_values(Config(), with_family({**found.values, **found.follow(found.values)}))
