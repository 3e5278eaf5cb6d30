"""Run `data_utils.clean_corpus` from a checkout that is not installed.

`python tools/clean_corpus.py --help` lists its flags.
"""

import _checkout  # noqa: F401

from data_utils.clean_corpus import cli

if __name__ == "__main__":
    cli()
