"""Run `megatron_tools.report.result_table` from a checkout that is not installed.

`python tools/result_table.py --help` lists its flags.
"""

import _checkout  # noqa: F401

from megatron_tools.report.result_table import cli

if __name__ == "__main__":
    cli()
