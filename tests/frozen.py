"""Exempt all imported objects from garbage collection; the fork server imports this module last.

Forked ranks then neither scan these objects nor copy their memory pages.
"""

import gc

from megatron.frozen import frozen_objects

gc.collect()
frozen_objects.freeze()
