"""Run `megatron.commands.report` from a checkout that is not installed.

`python tools/report.py --help` lists its flags.
"""

import _checkout  # noqa: F401

from megatron.commands.report import cli

if __name__ == "__main__":
    cli()
