"""Run `megatron_tools.simulate.simulate` from a checkout that is not installed.

`python tools/simulate.py --help` lists its flags.
"""

import _checkout  # noqa: F401

from megatron_tools.simulate.simulate import cli

if __name__ == "__main__":
    cli()
