"""`python tools/preprocess_data.py --help`, from a checkout that is not installed."""

import _checkout  # noqa: F401

from megatron.commands.preprocess_data import cli

if __name__ == "__main__":
    cli()
