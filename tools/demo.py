"""Run `megatron_tools.write.demo` from a checkout that is not installed.

`python tools/demo.py --help` lists its flags.
"""

import _checkout  # noqa: F401

from megatron_tools.write.demo_flags import cli

if __name__ == "__main__":
    cli()
