"""Whether a training script will take its flags, in a moment: `python -m megatron.config.check gpt2 RANKS FLAGS...`

Nothing is imported but settings, so that scripts can ask before they prepare a corpus, and training scripts before they import torch.
"""

import os
import sys
from pathlib import Path

from .command_line import parse
from .defaults import DEFAULTS
from .fields import ConfigError
from .help import help_if_asked


def first_look(family: str) -> None:
    """What a training script does first: show its settings if asked to, and end with code 2 and a sentence at flags that it will not take.

    Of several ranks the first one speaks, and the others go on to where all of them end.
    """
    help_if_asked(family)
    if os.environ.get("RANK", "0") != "0":
        return
    ranks = os.environ.get("WORLD_SIZE", "1")
    if not ranks.isdecimal():
        return  # refused where ranks meet
    try:
        parse(sys.argv[1:], DEFAULTS[family], int(ranks))
    except ConfigError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)


def main() -> None:
    """Exit code 0, or 2 after what the training script would have said."""
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
