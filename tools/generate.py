"""Run `megatron.commands.generate` from a checkout that is not installed.

`python tools/generate.py --help` lists its flags.
"""

import _checkout  # noqa: F401

from megatron.commands.generate import cli

if __name__ == "__main__":
    cli()
