"""Optional parts of a run. `megatron/config/feature_table.py` says which setting asks for which.

The core never imports this package by name; features import the core.
"""

from .. import config as _config  # noqa: F401  # first, because the settings import the files of features that have some
