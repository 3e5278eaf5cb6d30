"""Make forked ranks cheap; the fork server imports this module last.

All imported objects are exempt from garbage collection, so ranks neither scan them nor copy their memory pages. Ranks
do not wait for the disk, since no test interrupts the power.
"""

import gc
import os

from megatron.config.flags import read_flags
from megatron.frozen import frozen_objects

read_flags(["--no-flag-of-any-framework"])  # builds both parsers of settings, which forked ranks share
os.fsync = os.fdatasync = lambda handle: None
gc.collect()
frozen_objects.freeze()
