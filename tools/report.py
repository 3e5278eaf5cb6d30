"""Run `megatron_tools.report.report` from a checkout that is not installed.

`python tools/report.py --help` lists its flags.
"""

import _checkout  # noqa: F401

from megatron_tools.report.report import cli

if __name__ == "__main__":
    cli()
