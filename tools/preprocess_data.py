"""Run `megatron.commands.preprocess_data` from a checkout that is not installed.

`python tools/preprocess_data.py --help` lists its flags.
"""

import _checkout  # noqa: F401

from megatron.commands.preprocess_data import cli

if __name__ == "__main__":
    cli()
