"""Fast check of a training script's flags, without the import of torch.

Run it as `python -m megatron.config.check gpt2 RANKS FLAGS...`. Shell scripts check flags before they prepare a
corpus, training scripts before they import torch.
"""

import os
import sys
from pathlib import Path

from .command_line import parse
from .defaults import DEFAULTS
from .fields import ConfigError
from .help import help_if_asked


def first_look(family: str) -> None:
    """Handle `--help` and exit with code 2 on invalid flags, before anything else in a training script.

    Only rank 0 prints the error. The other ranks continue to the point where all ranks exit.
    """
    help_if_asked(family)
    if os.environ.get("RANK", "0") != "0":
        return
    ranks = os.environ.get("WORLD_SIZE", "1")
    if not ranks.isdecimal():
        return  # initialisation of the ranks refuses this value
    try:
        parse(sys.argv[1:], DEFAULTS[family], int(ranks))
    except ConfigError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)


def main() -> None:
    """Exit with 0 if the flags are valid, else print the training script's error and exit with 2."""
    family, ranks, *argv = sys.argv[1:]
    try:
        config = parse(argv, DEFAULTS[family], int(ranks))
        config.parallel.data_parallel_size(int(ranks))
        if (path := config.train.deepspeed_config) and not Path(path).is_file():
            raise ConfigError(f"--deepspeed-config {path}: there is no such file")
    except ConfigError as error:
        print(f"pretrain_{family}.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
