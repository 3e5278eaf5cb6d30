"""Run `megatron_tools.verify.verify_layout` from a checkout that is not installed.

`python tools/verify_layout.py --help` lists its flags.
"""

import _checkout  # noqa: F401

from megatron_tools.verify.verify_layout import cli

if __name__ == "__main__":
    cli()
