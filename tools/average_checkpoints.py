"""Run `megatron_tools.convert.average_checkpoints` from a checkout that is not installed.

`python tools/average_checkpoints.py --help` lists its flags.
"""

import _checkout  # noqa: F401

from megatron_tools.convert.average_flags import cli

if __name__ == "__main__":
    cli()
