"""Run `megatron.commands.launch` from a checkout that is not installed.

`python tools/launch.py --help` lists its flags.
"""

import _checkout  # noqa: F401

from megatron.commands.launch import cli

if __name__ == "__main__":
    cli()
