"""Parsing of a training command of any model family, for tools."""

from collections.abc import Sequence
from pathlib import Path

from .command_line import parse, values_of_files
from .defaults import DEFAULTS
from .flags import read_flags
from .names import replace_renamed_flags
from .parallel import accept_any_schedule
from .sections import Config


def parse_any_family(argv: Sequence[str], ranks: int = 1) -> Config:
    """Return the configuration of a training command, with the defaults of the family that `argv` names, or of GPT-2.

    The command may begin with an entry script, such as pretrain_llama.py, which then names the family; any other script
    trains a custom model without a family, and may register a schedule. ranks, errors: see `parse`.
    """
    if argv and argv[0].endswith(".py"):
        family = Path(argv[0]).stem.removeprefix("pretrain_")
        argv = argv[1:]
        if family not in DEFAULTS:
            with accept_any_schedule():
                return parse(argv, ranks=ranks)
    else:
        family = _named_family(argv)
    return parse(argv, {"family": family, **DEFAULTS[family]}, ranks)


def _named_family(argv: Sequence[str]) -> str:
    """Return the family that --family, or else the last --config file with a family, names; gpt2 if none does."""
    words, _ = replace_renamed_flags(argv)
    flags = read_flags(words)
    family = (values_of_files(flags.files) | flags.settings).get("family")
    return family if family in DEFAULTS else "gpt2"  # `parse` refuses an unknown family, None stands for GPT-2
