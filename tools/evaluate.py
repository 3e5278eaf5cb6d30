"""Run `megatron_tools.write.evaluate` from a checkout that is not installed.

`python tools/evaluate.py --help` lists its flags.
"""

import _checkout  # noqa: F401

from megatron_tools.write.evaluate_flags import cli

if __name__ == "__main__":
    cli()
