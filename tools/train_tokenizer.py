"""Run `data_utils.train_tokenizer` from a checkout that is not installed.

`python tools/train_tokenizer.py --help` lists its flags.
"""

import _checkout  # noqa: F401

from data_utils.train_tokenizer import cli

if __name__ == "__main__":
    cli()
