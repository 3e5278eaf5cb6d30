"""Run `megatron_tools.plan.plan` from a checkout that is not installed.

`python tools/plan.py --help` lists its flags.
"""

import _checkout  # noqa: F401

from megatron_tools.plan.plan_flags import cli

if __name__ == "__main__":
    cli()
