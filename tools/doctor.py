"""`python tools/doctor.py --help`, from a checkout that is not installed."""

import _checkout  # noqa: F401

from megatron.commands.doctor import cli

if __name__ == "__main__":
    cli()
