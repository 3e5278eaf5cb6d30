"""`--help` of a training script without the import of torch, which takes seconds."""

import sys
from pathlib import Path

from .command_line import build_parser


def help_if_asked(family: str | None = None) -> None:
    """Show the settings that `family` reads (all if None) and exit, if the command line has -h or --help."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        build_parser(Path(sys.argv[0]).name, family).parse_args(["--help"])
