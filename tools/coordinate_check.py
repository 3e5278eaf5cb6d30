"""Run `megatron_tools.report.coordinate_check` from a checkout that is not installed.

`python tools/coordinate_check.py --help` lists its flags.
"""

import _checkout  # noqa: F401

from megatron_tools.report.coordinate_flags import cli

if __name__ == "__main__":
    cli()
