"""`python tools/verify_layout.py --help`, from a checkout that is not installed."""

import _checkout  # noqa: F401

from megatron.commands.verify_layout import cli

if __name__ == "__main__":
    cli()
