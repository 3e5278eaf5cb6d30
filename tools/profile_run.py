"""Run `megatron_tools.simulate.profile_run` from a checkout that is not installed.

`python tools/profile_run.py --help` lists its flags.
"""

import _checkout  # noqa: F401

from megatron_tools.simulate.profile_run import cli

if __name__ == "__main__":
    cli()
