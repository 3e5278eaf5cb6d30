"""Run `megatron_tools.report.draw_schedule` from a checkout that is not installed.

`python tools/draw_schedule.py --help` lists its flags.
"""

import _checkout  # noqa: F401

from megatron_tools.report.draw_schedule import cli

if __name__ == "__main__":
    cli()
