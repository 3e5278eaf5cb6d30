"""Whether a training script will take its flags, in a moment: `python -m megatron.config.check gpt2 RANKS FLAGS...`

Nothing is imported but settings, so that scripts can ask before they prepare a corpus.
"""

import sys

from .command_line import parse
from .defaults import DEFAULTS
from .fields import ConfigError


def main() -> None:
    """Exit code 0, or 2 after what the training script would have said."""
    family, ranks, *argv = sys.argv[1:]
    try:
        parse(argv, DEFAULTS[family], int(ranks))
    except ConfigError as error:
        print(f"pretrain_{family}.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
