"""Exempt all imported objects from garbage collection; the fork server imports this module last.

Forked ranks then neither scan these objects nor copy their memory pages.
"""

import gc

from megatron.config.flags import read_flags
from megatron.frozen import frozen_objects

read_flags(["--no-flag-of-any-framework"])  # builds both parsers of settings, which forked ranks share
gc.collect()
frozen_objects.freeze()
