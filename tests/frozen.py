"""The last import of the fork server: it exempts all imported objects from garbage collection.

Forked ranks then neither scan these objects nor copy their memory pages.
"""

import gc

gc.collect()
gc.freeze()
