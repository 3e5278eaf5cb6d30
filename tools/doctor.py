"""Run `megatron_tools.doctor.doctor` from a checkout that is not installed.

`python tools/doctor.py --help` lists its flags.
"""

import _checkout  # noqa: F401

from megatron_tools.doctor.doctor import cli

if __name__ == "__main__":
    cli()
