"""Early check that reports all missing input files at once. A single missing file is reported when it is opened."""

import argparse

from megatron.storage import to_path
from megatron.tokenizer.base import TokenizerError
from megatron.tokenizer.load import find_vocab_file

from .files import missing_inputs


def check_inputs_exist(args: argparse.Namespace) -> None:
    """Raise MissingFiles if two or more of the paths in --input, --vocab-file and --load do not exist."""
    given = vars(args)  # a tool may lack a flag, and a flag takes one path in some tools and several in others
    inputs = given.get("input") or []
    if not isinstance(inputs, list):
        inputs = [inputs]
    problems = [f"there is no file {name}" for name in missing_inputs(inputs)]
    if isinstance(given.get("vocab_file"), str):
        try:
            find_vocab_file(given["vocab_file"])
        except TokenizerError as error:
            problems.append(str(error))
    if isinstance(given.get("load"), str) and not to_path(given["load"]).exists():
        problems.append(f"--load {given['load']} does not exist")
    if len(problems) > 1:  # the tool itself reports a single missing file when it opens it
        raise MissingFiles("\n  ".join([f"{len(problems)} inputs are missing:", *problems]))


class MissingFiles(ValueError):
    """Error for several missing input files; its message lists each file in a line of its own."""
