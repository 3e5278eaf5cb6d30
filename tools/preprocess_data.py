"""Run `data_utils.preprocess_data` from a checkout that is not installed.

`python tools/preprocess_data.py --help` lists its flags.
"""

import _checkout  # noqa: F401

from data_utils.preprocess_data import cli

if __name__ == "__main__":
    cli()
