"""`--help` of a training script, shown before torch is imported, which takes seconds."""

import sys
from pathlib import Path

from .command_line import build_parser


def help_if_asked(family: str | None = None) -> None:
    """Show the settings that models of `family` read (all without one), and end the process, if the command line asks for that."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        build_parser(Path(sys.argv[0]).name, family).parse_args(["--help"])
