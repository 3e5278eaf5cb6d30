"""Fast check of a training script's flags, without the import of torch.

Run it as `python -m megatron.config.check gpt2 RANKS FLAGS...`. Shell scripts check flags before they prepare a
corpus, training scripts before they import torch.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..streams import guarded
from .command_line import help_if_asked, parse
from .defaults import DEFAULTS
from .fields import ConfigError
from .sections import Config


def first_look(family: str) -> Config | None:
    """Return the settings of a training script before it imports anything heavy; exit on `--help` or invalid flags.

    Returns None on ranks other than 0, which parse the flags later, in `run`, so that only rank 0 prints an error.
    """
    help_if_asked(family)
    ranks = os.environ.get("WORLD_SIZE", "1")
    if os.environ.get("RANK", "0") != "0" or not ranks.isdecimal():  # an invalid WORLD_SIZE is refused later, by `run`
        return None
    with _one_sentence(Path(sys.argv[0]).name):
        return parse(sys.argv[1:], DEFAULTS[family], int(ranks), print_note)


def print_note(note: str) -> None:
    """Print a note on rank 0, before the process group exists."""
    if os.environ.get("RANK", "0") == "0":
        with guarded("training continues", "stdout"):
            print(f"note: {note}", flush=True)


@contextmanager
def _one_sentence(script: str) -> Iterator[None]:
    """Print a ConfigError of the block in one sentence and exit with code 2."""
    try:
        yield
    except ConfigError as error:
        print(f"{script}: {error}", file=sys.stderr)
        sys.exit(2)


def main() -> None:
    """Exit with 0 if the flags are valid, else print the training script's error and exit with 2."""
    family, ranks, *argv = sys.argv[1:]
    with _one_sentence(f"pretrain_{family}.py"):
        config = parse(argv, DEFAULTS[family], int(ranks))
        config.parallel.data_parallel_size(int(ranks))
        if (path := config.train.deepspeed_config) and not Path(path).is_file():
            raise ConfigError(f"--deepspeed-config {path}: there is no such file")


if __name__ == "__main__":
    main()
