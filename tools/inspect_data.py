"""Run `data_utils.inspect_data` from a checkout that is not installed.

`python tools/inspect_data.py --help` lists its flags.
"""

import _checkout  # noqa: F401

from data_utils.inspect_data import cli

if __name__ == "__main__":
    cli()
