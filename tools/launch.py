"""Run `megatron_tools.launch` from a checkout that is not installed.

`python tools/launch.py --help` lists its flags.
"""

import _checkout  # noqa: F401

from megatron_tools.launch import cli

if __name__ == "__main__":
    cli()
