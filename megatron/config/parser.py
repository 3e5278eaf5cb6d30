"""The parser of the command line: one flag per setting, and its `--help`."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import Field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from .._compat import compat
from ..json_text import brief
from .fields import ConfigError, OneOf, flag, types_of
from .sections import SECTIONS, settings


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


def build_parser(script: str | None = None, family: str | None = None, foreign: bool = True) -> argparse.ArgumentParser:
    """Return a parser with one flag per setting; its result contains only the flags that are given.

    script, family: the entry script and the model family for which `--help` is shown. `--help` hides the settings of
    other families. foreign: accept flags of other frameworks, too.
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
        groups[name].add_argument(flag(f.name), **_form(section, f, family))
    # Launchers pass this flag to every process. It is ignored, as the environment has the rank.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    if foreign:
        compat("flags.translate").add_to(parser)
    return parser


def _form(section: type, setting: Any, family: str | None) -> dict[str, Any]:
    """Return the arguments of `add_argument` for a setting."""
    kinds = types_of(section, setting.name)
    text = f"{setting.metadata['help']} (default: {setting.default})".replace("%", "%%")
    families = setting.metadata["family"]
    if family and families and family not in families:
        text = argparse.SUPPRESS
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction, "help": text}
    kind = next(each for each in kinds if each is not type(None))
    form: dict[str, Any] = {"metavar": _metavar(setting, kind), "help": text}
    if kind is tuple:
        return form | {"nargs": "+", "type": str, "action": partial(_Words, none=setting.default)}
    return form | {"type": _or_none(kind) if type(None) in kinds else kind}


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
    check = setting.metadata["check"]
    if isinstance(check, OneOf):
        return "{" + ",".join(str(choice) for choice in check.choices if choice is not None) + "}"
    if kind is not tuple:
        return kind.__name__.upper()
    if setting.name.endswith("_path"):
        return "PATH"
    return "A-B" if setting.name.startswith("skip_") else "NAME"
