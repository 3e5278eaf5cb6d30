"""Fast check of a training script's flags, without importing torch.

Run it as `python -m megatron.config.check gpt2 RANKS FLAGS...`. Shell scripts check the flags before they prepare a
corpus. Training scripts check their flags before they import torch.
"""

import gc
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from ..frozen import frozen_objects
from ..streams import guard_streams
from .command_line import parse
from .defaults import DEFAULTS
from .fields import ConfigError
from .sections import Config


def parse_early(family: str) -> Config | None:
    """Return the settings of a training script, then import torch; exit on `--help` or invalid flags.

    Returns None on ranks other than 0: `training.entry.run` parses their flags later, so that only rank 0 prints
    an error.
    """
    print_help_if_asked(family)
    ranks = os.environ.get("WORLD_SIZE", "1")
    config = None
    # An invalid WORLD_SIZE is refused later, by `training.entry.run`.
    if os.environ.get("RANK", "0") == "0" and ranks.isdecimal():
        with exit_on_config_error(Path(sys.argv[0]).name):
            config = parse(sys.argv[1:], DEFAULTS[family], int(ranks), print_note)
    _import_torch()
    return config


def _import_torch() -> None:
    """Import torch and DeepSpeed without garbage collections, which would take a fifth of a start."""
    gc.disable()
    importlib.import_module("tds.api")
    frozen_objects.freeze()
    gc.enable()


def print_help_if_asked(family: str | None = None) -> None:
    """Print help on the settings of `family` and exit if the command line has -h or --help, perhaps with a topic."""
    # `--help optim` gives the topic "optim", and a --help at the end of the line the topic None.
    topics = [after for word, after in pairwise([*sys.argv[1:], None]) if word in ("-h", "--help")]
    if not topics:  # no help is asked for
        return
    from .help import help_text

    script = Path(sys.argv[0]).name
    with guard_streams("the rest of the help is lost", "stdout"), exit_on_config_error(script):
        print(help_text(script, family, topics[0]))
    sys.exit(0)


first_look = parse_early  # name of 0.2.0


def print_note(note: str) -> None:
    """Print a note on rank 0, before the process group exists."""
    if os.environ.get("RANK", "0") == "0":
        with guard_streams("training continues", "stdout"):
            print(f"note: {note}", flush=True)


@contextmanager
def exit_on_config_error(script: str) -> Iterator[None]:
    """Print the message of a ConfigError that the `with` block raises, and exit with code 2."""
    try:
        yield
    except ConfigError as error:
        print(f"{script}: {error}", file=sys.stderr)
        sys.exit(2)


def main() -> None:
    """Exit with code 0 if the flags are valid, else print the training script's error message and exit with code 2."""
    family, ranks, *argv = sys.argv[1:]
    with exit_on_config_error(f"pretrain_{family}.py"):
        config = parse(argv, DEFAULTS[family], int(ranks))
        config.parallel.data_parallel_size(int(ranks))  # raises if this number of ranks cannot be divided
        path = config.train.deepspeed_config
        if path and not Path(path).is_file():
            raise ConfigError(f"--deepspeed-config {path}: there is no such file")


if __name__ == "__main__":
    main()
