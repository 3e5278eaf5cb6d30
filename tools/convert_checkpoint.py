"""Run `megatron_tools.convert.convert_checkpoint` from a checkout that is not installed.

`python tools/convert_checkpoint.py --help` lists its flags.
"""

import _checkout  # noqa: F401

from megatron_tools.convert.convert_flags import cli

if __name__ == "__main__":
    cli()
