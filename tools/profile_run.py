"""`python tools/profile_run.py --help`, from a checkout that is not installed."""

import _checkout  # noqa: F401

from megatron.commands.profile_run import cli

if __name__ == "__main__":
    cli()
