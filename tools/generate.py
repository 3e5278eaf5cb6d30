"""Run `megatron_tools.write.generate` from a checkout that is not installed.

`python tools/generate.py --help` lists its flags.
"""

import _checkout  # noqa: F401

from megatron_tools.write.generate_flags import cli

if __name__ == "__main__":
    cli()
